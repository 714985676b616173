local record, readers, queue, alive, bells = KEYS[1], KEYS[2], KEYS[3], KEYS[4], ARGV[1]
local owner, is_final = ARGV[2], ARGV[3] == '1'
local clock = redis.call('TIME')
local now = clock[1] * 1000000 + clock[2]
local known = redis.call('HMGET', record, 'lease', 'ended', 'available')
local since, lasts, holder = string.match(known[1] or '', '^(%d+) (%d+) (.*)$')
local mark = string.sub(owner, 1, 16)
local ended = string.sub(mark .. ' ' .. (known[2] or ''), 1, 136)
local is_alone, answer, field, last = (since or 0) + (lasts or 0) - now > 0, 0, 'holder', {}

if is_alone and holder == owner then
  answer, is_alone = 1, false
  -- Redis refuses to begin with HSET when its memory is full.
  if type(redis.pcall('HSET', record, 'lease', '', 'ended', ended)) ~= 'number' then
    redis.call('HDEL', record, 'lease')
    redis.call('HSET', record, 'ended', ended)
  end
elseif not is_alone and (redis.call('ZSCORE', readers, owner) or 0) - now > 0 then
  answer, field = 1, 'h:' .. owner
  redis.call('ZREM', readers, owner)
  redis.call('HSET', record, 'ended', ended)
end
if answer == 1 and (ARGV[4] or '0') ~= '0' then
  local available = string.match(redis.call('HGET', record, field), '^%d+ (%d+)') + ARGV[4]
  if available > math.max(now, redis.call('HGET', record, 'available') or 0) then
    redis.call('HSET', record, 'available', available)
    local left = math.ceil((available - now) / 1000) + 7200000
    if redis.call('PTTL', record) < left - 600000 then redis.call('PEXPIRE', record, left) end
  end
elseif answer == 1 and field == 'holder' and known[3] then
  redis.call('HDEL', record, 'available') -- it was never used: its own min_hold, of when it was granted
end
if field ~= 'holder' then redis.call('HDEL', record, field) end
if is_final then
  local revoked = redis.call('HGET', record, 'revoked') or ''
  if not string.find(revoked, mark, 1, true) then
    redis.call('HSET', record, 'revoked', string.sub(mark .. ' ' .. revoked, 1, 136))
    if redis.call('PTTL', record) < 6600000 then redis.call('PEXPIRE', record, 7200000) end
  end
end
-- Nearly always nobody waits.
local has_waiters = redis.call('EXISTS', queue) == 1
if answer == 1 and not has_waiters then return 1 end

if not is_alone then last = redis.pcall('ZREVRANGE', readers, 0, 0, 'WITHSCORES') end
local is_shared = (last[2] or 0) - now > 0
if answer == 0 then
  answer = (is_alone or is_shared) and 2 or 0
  if string.find(known[2] or '', mark, 1, true) then answer = 1 end
end
if bells == '' or is_alone or not has_waiters then return answer end
-- Rings the first writer, or all readers before the first writer; with readers inside, no writer.
for _, waiter in ipairs(redis.call('ZRANGE', queue, 0, 63)) do
  if (redis.call('ZSCORE', alive, waiter) or 0) - now > 0 then
    local bell, is_writer = bells .. string.sub(waiter, 2), string.sub(waiter, 1, 1) == 'x'
    if is_writer and is_shared then break end
    if redis.pcall('EXISTS', bell) == 0 then
      redis.call('RPUSH', bell, 1)
      redis.call('PEXPIRE', bell, 10000)
    end
    if is_writer then break end
    is_shared = true
  end
end
return answer
