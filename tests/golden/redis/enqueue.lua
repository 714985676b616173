local queue, alive, waiter = KEYS[3], KEYS[4], 'x' .. ARGV[2]
local clock = redis.call('TIME')
local now = clock[1] * 1000000 + clock[2]
local last = redis.call('ZRANGE', queue, -1, -1, 'WITHSCORES')
redis.call('ZADD', queue, 'NX', math.max((last[2] or 0) + 1, now), waiter)
redis.call('ZADD', alive, now + 500000, waiter)
for _, gone in ipairs(redis.call('ZRANGEBYSCORE', alive, '-inf', now - 10000000)) do
  redis.call('ZREM', queue, gone)
  redis.call('ZREM', alive, gone)
end
redis.call('PEXPIRE', queue, 60000)
redis.call('PEXPIRE', alive, 60000)
return 1
