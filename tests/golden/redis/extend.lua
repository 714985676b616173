local clock = redis.call('TIME')
local now = clock[1] * 1000000 + clock[2]
local kept, key = {}, 1
-- Redis refuses to begin with HSET, not to go on with it, when its memory is full: this needs none.
redis.call('HDEL', KEYS[1], '')
for i = 1, #ARGV - 2, 3 do
  local owner, ttl, keys = ARGV[i], ARGV[i + 1], {KEYS[key], ARGV[i + 2] == 's' and KEYS[key + 1] or nil}
  local record, readers = keys[1], keys[2]
  key = key + #keys
  local since, lasts, holder = string.match(redis.call('HGET', record, 'lease') or '', '^(%d+) (%d+) (.*)$')
  local is_alone = holder == owner
  local ends = is_alone and since + lasts or readers and redis.call('ZSCORE', readers, owner) or 0
  kept[#kept + 1] = ends - now > 0 and 1 or 0
  if ends - now > 0 and now + ttl - ends > 0 then
    if is_alone then
      redis.call('HSET', record, 'lease', string.format('%.0f', now) .. ' ' .. ttl .. ' ' .. owner)
    else
      redis.call('ZADD', readers, now + ttl, owner)
    end
    local left = math.ceil(ttl / 1000) + 7200000
    for _, each in ipairs(keys) do
      -- Nearly as long is long enough, and saves a write.
      if redis.call('PTTL', each) < left - 600000 then redis.call('PEXPIRE', each, left) end
    end
  end
end
return kept
