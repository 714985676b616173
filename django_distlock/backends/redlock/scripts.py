"""The Lua scripts for one of the servers: a lock that is exclusive and plain; others decide with it.

Redis 6.0 or later, or Valkey. Instants are microseconds of the server's clock (TIME), but for *sent*: by the
asking process's clock. A lock has one key, its *record*, a hash:

- ``owner``, ``acquired``, ``ends``, ``sent``, ``holder``, ``name``: who has it, since and until when, and when this was
  last asked for;
- ``token``: the last one that was given here, or written back by somebody who won the majority; ``agreed``:
  that which the owner wrote back, if it did;
- ``ended``: "owner=sent" and r (released) or v (void), for the last owners that ended: what they sent
  before that counts for nothing, however late it arrives.

and a *queue*, a sorted set: who waits, by the instant at which it was first refused. A waiter is "channel owner", and is
woken by a message to that channel (PUBLISH). The queue decides nothing: without it a waiter only sleeps longer,
so its commands may fail, as for a user of Redis that may not publish.

Scripts are sent as text each time: measured, that costs no more than EVALSHA, and no NOSCRIPT can come back.
"""

from __future__ import annotations

from django_distlock.backends.redis.scripts import CLOCK, RETENTION

#: How much of the last owners' ends is kept, in bytes: sixteen of them.
ENDED = 16 * 52
#: A *sent* that nothing comes after.
FOR_EVER = 2**53 - 1

# KEYS: record.
_COMMON = f"""{CLOCK}
local record, queue = KEYS[1], KEYS[1] .. ':q'

local function keep(ends)
  local left = math.max(0, math.ceil((ends - now) / 1000)) + {RETENTION * 1000}
  -- Nearly as long is long enough, and saves a write.
  if redis.call('PTTL', record) < left - 600000 then redis.call('PEXPIRE', record, text(left)) end
end

local function has(owner)
  local known = redis.call('HMGET', record, 'owner', 'ends')
  return known[1] == owner and number(known[2]) > now
end

local function is_held() return number(redis.call('HGET', record, 'ends')) > now end

local function forget() redis.call('HDEL', record, 'owner', 'ends', 'sent', 'holder') end

local function extend(ttl)
  local ends = math.max(number(redis.call('HGET', record, 'ends')), now + ttl)
  redis.call('HSET', record, 'ends', text(ends))
  keep(ends)
end

local function ended(owner)
  local at, how = string.match(redis.call('HGET', record, 'ended') or '', owner .. '=(%d+)([rv])')
  return number(at), how
end

local function bury(owner, sent, how)
  local others = string.gsub(redis.call('HGET', record, 'ended') or '', owner .. '=%d+[rv] ?', '')
  local all = owner .. '=' .. text(sent) .. how .. ' ' .. others
  redis.call('HSET', record, 'ended', string.sub(all, 1, {ENDED}))
end

-- Wakes the waiter that has waited longest. One whose channel nobody listens to is gone: the next one then.
local function ring()
  repeat
    local waiter = redis.pcall('ZPOPMIN', queue)[1]
    if not waiter then return end
    local channel, owner = string.match(waiter, '^(%S+) (%S+)$')
    local heard = channel and redis.pcall('PUBLISH', channel, owner) or 0
  until heard ~= 0
end
"""

# Asks for this server's vote.
# ARGV: owner, sent, ttl (microseconds), name, holder, seconds that the server must have been up ('0': none),
# '1' if that is not asked of a server with an append-only file, the channel of a waiter ('': does not wait).
# Returns {1, token, 1 if it was agreed on}; {0, owner, microseconds left, holder, sent} if somebody has it;
# {2, seconds} if the server started too lately.
# The same owner again: the same token. Asked before its own release: refused, by nobody.
_ACQUIRE = """
local owner, sent, ttl = ARGV[1], tonumber(ARGV[2]), tonumber(ARGV[3])
local known = redis.call('HMGET', record, 'token', 'owner', 'ends', 'holder', 'sent', 'agreed')
if ended(owner) >= sent then return {0, '', 0, '', ''} end
local left = number(known[3]) - now
if left > 0 and known[2] == owner then
  redis.call('HSET', record, 'sent', text(math.max(number(known[5]), sent)))
  extend(ttl)
  return {1, number(known[1]), known[6] == known[1] and 1 or 0}
end
if left > 0 then
  if ARGV[8] ~= '' then
    redis.pcall('ZADD', queue, 'NX', text(now), ARGV[8] .. ' ' .. owner)
    redis.pcall('PEXPIRE', queue, 60000)
  end
  return {0, known[2], left, known[4], known[5]}
end

local function is_durable()
  return ARGV[7] == '1' and string.find(redis.call('INFO', 'persistence'), 'aof_enabled:1', 1, true) ~= nil
end

local guard = tonumber(ARGV[6])
if guard > 0 and not is_durable() then
  -- It counts whole seconds, of which the first may have been a short one.
  local up = number(string.match(redis.call('INFO', 'server'), 'uptime_in_seconds:(%d+)')) - 1
  if up < guard then return {2, math.ceil(guard - up)} end
end

local token = math.max(number(known[1]) + 1, now)
redis.call('HSET', record, 'owner', owner, 'sent', text(sent), 'ends', text(now + ttl), 'token', text(token),
  'name', ARGV[4], 'holder', ARGV[5], 'agreed', '', 'acquired', text(now))
keep(now + ttl)
return {1, token, 0}
"""

# Gives it back; whatever this owner asked for earlier is void. ARGV: owner, sent, and the channel of one that
# does not want the lock any more: it leaves the queue, and who is next is woken ('': it asks again).
# Returns 1 released (also when asked again), 0 it was gone, 2 gone and somebody else has it.
_RELEASE = """
local owner, sent = ARGV[1], tonumber(ARGV[2])
local answer, how = is_held() and 2 or 0, 'v'
if has(owner) then
  -- Overtaken by a later question of the same owner: that one stands.
  if number(redis.call('HGET', record, 'sent')) > sent then return 0 end
  forget()
  answer, how = 1, 'r'
else
  local at, before = ended(owner)
  sent = math.max(sent, at)
  if before == 'r' then answer, how = 1, 'r' end
end
bury(owner, sent, how)
keep(now)
if ARGV[3] ~= '' and redis.pcall('EXISTS', queue) == 1 then
  redis.pcall('ZREM', queue, ARGV[3] .. ' ' .. owner)
  if answer ~= 2 then ring() end
end
return answer
"""

# Lets leases live longer, never shorter, if they are still their owner's.
# KEYS: the records. ARGV of each: owner, ttl (microseconds). Returns 1 or 0 for each.
_EXTEND = """
local kept = {}
for i, key in ipairs(KEYS) do
  record = key
  local owner, ttl = ARGV[2 * i - 1], tonumber(ARGV[2 * i])
  kept[i] = has(owner) and 1 or 0
  if kept[i] == 1 then extend(ttl) end
end
return kept
"""

# Has an owner hold what another one holds, with the same token, for its own ttl from now.
# ARGV: new owner, former owner, ttl (microseconds), holder, sent. Returns 1 (also when asked again), or 0; asked
# before its own release: 0.
_TAKE_OVER = f"""
local owner, former, ttl = ARGV[1], ARGV[2], tonumber(ARGV[3])
if ended(owner) >= tonumber(ARGV[5]) then return 0 end
if has(former) then
  redis.call('HSET', record, 'owner', owner, 'holder', ARGV[4], 'sent', ARGV[5], 'ends', text(now + ttl))
  bury(former, {FOR_EVER}, 'v')
end
if not has(owner) then return 0 end
extend(ttl)
return 1
"""

# Writes a token back: no later one that this server gives is lower.
# ARGV: owner, token. Returns 1 if this owner has it here, or 0, and then nothing is written.
_RAISE = """
if not has(ARGV[1]) then return 0 end
local token = math.max(number(redis.call('HGET', record, 'token')), tonumber(ARGV[2]))
redis.call('HSET', record, 'token', text(token), 'agreed', ARGV[2])
return 1
"""

# Looks, and writes nothing. KEYS: the records.
# Returns for each {} or {owner, microseconds left, holder, name, token agreed on or 0, microseconds since it was acquired,
# waiters that listen to their channels}.
_LOOK = """
local function waiters(queue)
  local all = 0
  for _, waiter in ipairs(redis.pcall('ZRANGE', queue, 0, -1)) do
    local heard = redis.pcall('PUBSUB', 'NUMSUB', (string.match(waiter, '^%S+')))
    if number(heard[2]) > 0 then all = all + 1 end
  end
  return all
end

local seen = {}
for i, key in ipairs(KEYS) do
  local known = redis.call('HMGET', key, 'owner', 'ends', 'holder', 'name', 'agreed', 'acquired')
  local left = number(known[2]) - now
  seen[i] = {}
  if left > 0 then
    local age = now - number(known[6])
    seen[i] = {known[1], left, known[3], known[4], number(known[5]), age, waiters(key .. ':q')}
  end
end
return seen
"""

# Ends a holding for its operator: as if it had expired, and with a higher token.
# ARGV: owner. Returns 1 if it was there, or 0.
_FORCE = f"""
if not has(ARGV[1]) then return 0 end
redis.call('HSET', record, 'token', text(math.max(number(redis.call('HGET', record, 'token')) + 1, now)))
forget()
bury(ARGV[1], {FOR_EVER}, 'v')
keep(now)
ring()
return 1
"""

ACQUIRE = _COMMON + _ACQUIRE
RELEASE = _COMMON + _RELEASE
EXTEND = _COMMON + _EXTEND
TAKE_OVER = _COMMON + _TAKE_OVER
RAISE = _COMMON + _RAISE
LOOK = _COMMON + _LOOK
FORCE = _COMMON + _FORCE
