local record, readers, queue, alive, bells, position = KEYS[1], KEYS[2], KEYS[3], KEYS[4], ARGV[1], ARGV[2]
local clock = redis.call('TIME')
local now = clock[1] * 1000000 + clock[2]
local left = redis.call('ZREM', queue, 'x' .. position, 's' .. position)
if left > 0 then redis.call('ZREM', alive, 'x' .. position, 's' .. position) end
redis.pcall('DEL', bells .. position)
local since, lasts = string.match(redis.call('HGET', record, 'lease') or '', '^(%d+) (%d+)')
if (since or 0) + (lasts or 0) - now > 0 then return left end

-- Rings as RELEASE does.
local last = redis.call('ZREVRANGE', readers, 0, 0, 'WITHSCORES')
local is_shared = (last[2] or 0) - now > 0
for _, waiter in ipairs(redis.pcall('ZRANGE', queue, 0, 63)) do
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
return left
