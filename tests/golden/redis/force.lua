local record, readers, owner = KEYS[1], KEYS[2], ARGV[2]
local clock = redis.call('TIME')
local now = clock[1] * 1000000 + clock[2]
local known = redis.call('HMGET', record, 'lease', 'token')
local since, lasts, holder = string.match(known[1] or '', '^(%d+) (%d+) (.*)$')
local is_alone = (since or 0) + (lasts or 0) - now > 0
if is_alone and holder == owner then
  redis.call('HDEL', record, 'lease')
elseif not is_alone and (redis.call('ZSCORE', readers, owner) or 0) - now > 0 then
  redis.call('ZREM', readers, owner)
  redis.call('HDEL', record, 'h:' .. owner)
elseif is_alone or (redis.call('ZREVRANGE', readers, 0, 0, 'WITHSCORES')[2] or 0) - now > 0 or owner ~= '' or known[2] ~= ARGV[3] then
  return 0
end
-- What the others reserved by min_hold stays.
local last = redis.pcall('ZREVRANGE', readers, 0, 0, 'WITHSCORES')
if (last[2] or 0) - now <= 0 then redis.call('HDEL', record, 'available') end
redis.call('HSET', record, 'token', math.max((known[2] or 0) + 1, now))
if redis.call('PTTL', record) < 6600000 then redis.call('PEXPIRE', record, 7200000) end
return 1
