local record, readers, owner, former, ttl = KEYS[1], KEYS[2], ARGV[2], ARGV[3], ARGV[4]
local clock = redis.call('TIME')
local now = clock[1] * 1000000 + clock[2]
local known = redis.call('HMGET', record, 'lease', 'revoked')
if string.find(known[2] or '', string.sub(owner, 1, 16), 1, true) then return 0 end

-- When the leases of both end, and the fields that describe them.
local since, lasts, holder = string.match(known[1] or '', '^(%d+) (%d+) (.*)$')
local ends, mine, theirs, my_field, their_field = (since or 0) + (lasts or 0), 0, 0, 'holder', 'holder'
local is_alone = ends > now
if is_alone then
  mine, theirs = holder == owner and ends or 0, holder == former and ends or 0
else
  mine, theirs = redis.call('ZSCORE', readers, owner) or 0, redis.call('ZSCORE', readers, former) or 0
  my_field, their_field = 'h:' .. owner, 'h:' .. former
end
-- As in EXTEND.
redis.call('HDEL', record, '')
if mine - now > 0 then
  ttl = string.format('%.0f', math.max(mine - now, ttl))
elseif theirs - now > 0 then
  local described = string.match(redis.call('HGET', record, their_field), '^%d+ %d+ ') .. ARGV[5]
  if not is_alone then redis.call('HDEL', record, their_field) end
  redis.call('HSET', record, my_field, described)
else
  return 0
end
if is_alone then
  redis.call('HSET', record, 'lease', string.format('%.0f', now) .. ' ' .. ttl .. ' ' .. owner)
else
  redis.call('ZADD', readers, now + ttl, owner)
  if mine - now <= 0 then redis.call('ZREM', readers, former) end
end
local left = math.ceil(ttl / 1000) + 7200000
for i = 1, is_alone and 1 or 2 do
  if redis.call('PTTL', KEYS[i]) < left - 600000 then redis.call('PEXPIRE', KEYS[i], left) end
end
return 1
