local clock = redis.call('TIME')
local now = clock[1] * 1000000 + clock[2]
local answers = {}
for i = 1, #KEYS, 3 do
  local record, readers, alive = KEYS[i], KEYS[i + 1], KEYS[i + 2]
  local known = redis.call('HMGET', record, 'name', 'token', 'available', 'lease')
  local since, lasts, holder = string.match(known[4] or '', '^(%d+) (%d+) (.*)$')
  local found, mode = {holder, (since or 0) + (lasts or 0)}, 'x'
  if found[2] <= now then
    found = redis.call('ZRANGE', readers, 0, -1, 'WITHSCORES')
    mode = found[1] and 's' or 'x'
  end
  local answer = {known[1] or '', (known[2] or 0) + 0, (known[3] or 0) - now, 0, mode}
  for j = 1, #found, 2 do
    local left = found[j + 1] - now
    if left > 0 then
      local described = redis.call('HGET', record, mode == 's' and 'h:' .. found[j] or 'holder') or ''
      local acquired, holder = string.match(described, '^%d+ (%d+) (.*)$')
      for _, each in ipairs({found[j], left, now - (acquired or 0), holder or ''}) do answer[#answer + 1] = each end
    end
  end
  local is_free = #answer == 5 and answer[3] <= 0
  if not is_free then answer[4] = redis.call('ZCOUNT', alive, string.format('(%.0f', now), '+inf') end
  answers[#answers + 1] = not is_free and answer
end
return answers
