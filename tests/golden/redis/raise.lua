local clock = redis.call('TIME')
local now = clock[1] * 1000000 + clock[2]
local known = redis.call('HMGET', KEYS[1], 'token', 'lease', 'holder')
local since, lasts, owner = string.match(known[2] or '', '^(%d+) (%d+) (.*)$')
if owner ~= ARGV[2] or since + lasts - now <= 0 then return 0 end
local acquired, holder = string.match(known[3], '^%d+ (%d+) (.*)$')
local latest = string.format('%.0f', math.max(known[1], ARGV[3]))
redis.call('HSET', KEYS[1], 'token', latest, 'holder', ARGV[3] .. ' ' .. acquired .. ' ' .. holder)
return 1
