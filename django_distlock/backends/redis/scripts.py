"""The Lua scripts, each with its contract: what Redis carries out as one step.

Redis 6.0 or later, or Valkey. Instants are microseconds of the server's clock (TIME). A lock has

- *record*, a hash: ``token`` the last one given, ``mode`` x (exclusive) or s (shared), ``available``
  the instant from which others may have it, if min_hold reserved it, ``name``, ``ended`` the last owners that gave it back,
  ``revoked`` the last ones that are refused from now on, and for each
  holder ``h:OWNER``: "token acquired holder";
- *holders*, a sorted set: owner by the instant its lease ends;
- *queue*, a sorted set: waiter (mode and owner) by ticket; *alive*: waiter by the end of its patience;
- a *doorbell* for each waiter, the list ``BELLS`` + owner, which it blocks on;
- a key ``:r`` for as long as min_hold refuses it to others, by which listing finds it.

Each place of a lock with a limit has a record, holders and ``:r`` of its own; the queue, ``alive`` and the doorbells are
those of all its places.

The record outlives its lock by RETENTION: so tokens rise though the clock may step back, and an
answer can be given twice.
"""

from __future__ import annotations

import hashlib
from typing import NamedTuple

#: Seconds for which what is known of a free lock is kept.
RETENTION = 2 * 3600
#: Seconds without a word from a waiter after which others are served before it.
PATIENCE = 0.5
#: Seconds of silence after which a waiter loses its place for good.
FORGOTTEN = 10.0

#: What scripts begin with: the server's clock, and numbers from and to text.
#: Commands are given numbers as they are; joined to text, Lua itself would write 1.76e+15.
CLOCK = """
local clock = redis.call('TIME')
local now = clock[1] * 1000000 + clock[2]

local function text(number) return string.format('%.0f', number) end
local function number(value) return tonumber(value or 0) or 0 end
"""

# KEYS: record, holders, queue, alive, and what min_hold reserves. ARGV[1]: what the names of
# doorbells begin with. A cluster that is moving the slot refuses a script before it has begun, by its KEYS; doorbells
# are not among them, as only the server knows who waits: one that cannot be reached at that moment does not ring.
# *instant* is now as text: to join it costs less than to format a number.
_CLOCK = f"""{CLOCK}
local instant = clock[1] .. string.sub('00000' .. clock[2], -6)
"""
_OF_LOCK = f"""{_CLOCK}
local record, holders, queue, alive, reserved, bells = KEYS[1], KEYS[2], KEYS[3], KEYS[4], KEYS[5], ARGV[1]
"""

# Each command takes about a microsecond, and each function is defined again in each run. So if nobody is in the way,
# scripts return before they come to these functions.
_FUNCTIONS = f"""
local function keep(ends)
  local left = math.max(0, math.ceil((ends - now) / 1000)) + {RETENTION * 1000}
  for _, key in ipairs({{record, holders}}) do
    -- Nearly as long is long enough, and saves a write.
    if redis.call('PTTL', key) < left - 600000 then redis.call('PEXPIRE', key, left) end
  end
end

local function described(owner)
  local known = redis.call('HGET', record, 'h:' .. owner) or ''
  local token, acquired, holder = string.match(known, '^(%d+) (%d+) (.*)$')
  return number(token), number(acquired), holder or ''
end

local function hold_back(instant)
  if instant > now and instant > number(redis.call('HGET', record, 'available')) then
    redis.call('HSET', record, 'available', instant)
    redis.call('SET', reserved, '', 'PX', math.ceil((instant - now) / 1000))
    keep(instant)
  end
end

local function forget(owner)
  redis.call('ZREM', holders, owner)
  redis.call('HDEL', record, 'h:' .. owner)
end

local function expire()
  for _, owner in ipairs(redis.call('ZRANGEBYSCORE', holders, '-inf', now)) do
    forget(owner)
  end
end

-- Calls visit(mode, owner) for each waiter that is alive, in the order of tickets, until it says true.
local function each_waiter(visit)
  local first = 0
  repeat
    local some = redis.call('ZRANGE', queue, first, first + 15)
    for _, waiter in ipairs(some) do
      local patience = number(redis.call('ZSCORE', alive, waiter))
      if patience > now and visit(string.sub(waiter, 1, 1), string.sub(waiter, 2)) then return end
    end
    first = first + 16
  until #some < 16
end

local function ring(owner)
  local bell = bells .. owner
  if redis.pcall('EXISTS', bell) == 0 then
    redis.call('RPUSH', bell, 1)
    redis.call('PEXPIRE', bell, 10000)
  end
end

-- Wakes the first writer, or all readers before the first writer; with readers inside, no writer.
local function wake()
  if redis.call('EXISTS', queue) == 0 then return end
  -- With its last holder the key is gone, which a cluster that is moving the slot reports as an error.
  local count, is_first = redis.pcall('ZCARD', holders), true
  local has_readers = type(count) == 'number' and count > 0
  if has_readers and redis.call('HGET', record, 'mode') == 'x' then return end
  each_waiter(function(mode, owner)
    if mode == 'x' then
      if is_first and not has_readers then ring(owner) end
      return true
    end
    is_first = false
    ring(owner)
  end)
end

local function leave(owner)
  local left = redis.call('ZREM', queue, 'x' .. owner, 's' .. owner)
  if left > 0 then redis.call('ZREM', alive, 'x' .. owner, 's' .. owner) end
  redis.pcall('DEL', bells .. owner)
  return left
end

local function is_noted(list, owner)
  return string.find(redis.call('HGET', record, list) or '', owner, 1, true) ~= nil
end

local function busy()
  local last = redis.call('ZREVRANGE', holders, 0, 0, 'WITHSCORES')
  local holder, ends = '', math.max(number(last[2]), number(redis.call('HGET', record, 'available')))
  if last[1] then holder = select(3, described(last[1])) end
  return {{0, holder, ends > now and ends - now or -1}}
end
"""

# Gives whoever is refused a place in the queue, if it is to have one, and returns who has the lock.
_QUEUE = f"""
if ARGV[8] ~= '' then
  local last = redis.call('ZRANGE', queue, -1, -1, 'WITHSCORES')
  redis.call('ZADD', queue, 'NX', math.max(number(last[2]) + 1, now), ARGV[3] .. owner)
  redis.call('ZADD', alive, now + {PATIENCE * 1e6:.0f}, ARGV[3] .. owner)
  for _, waiter in ipairs(redis.call('ZRANGEBYSCORE', alive, '-inf', now - {FORGOTTEN * 1e6:.0f})) do
    redis.call('ZREM', queue, waiter)
    redis.call('ZREM', alive, waiter)
  end
  redis.call('PEXPIRE', queue, 60000)
  redis.call('PEXPIRE', alive, 60000)
end
"""

# Grants a free lock to this owner. *known*: the record's token and mode. It writes nothing that is there already.
_GRANT = f"""
  local token, left = instant, ttl
  if number(known[1]) >= now then token = text(known[1] + 1) end
  if known[2] ~= mode then redis.call('HSET', record, 'mode', mode, 'name', ARGV[6]) end
  redis.call('HSET', record, 'token', token, 'h:' .. owner, token .. ' ' .. instant .. ' ' .. ARGV[7])
  redis.call('ZADD', holders, now + ttl, owner)
  if mode == 'x' and min_hold ~= '0' then
    redis.call('HSET', record, 'available', now + min_hold)
    redis.call('SET', reserved, '', 'PX', math.ceil(min_hold / 1000))
    left = math.max(ttl, min_hold)
  end
  left = math.ceil(left / 1000) + {RETENTION * 1000}
  -- Nearly as long is long enough, and saves a write. Only readers find other holders.
  if redis.call('PTTL', record) < left - 600000 then redis.call('PEXPIRE', record, left) end
  if mode == 'x' or redis.call('PTTL', holders) < left - 600000 then redis.call('PEXPIRE', holders, left) end
"""

# Asks for the lock, once.
# ARGV: bells, owner, mode, ttl, min_hold (microseconds), name, holder, '1' to have a place in the queue if it is
# refused, '1' if the first in the queue is always served first.
# Returns {1, token}, or {0, holder of the lease that ends last, microseconds left or -1}.
# The same owner again: the same token. An owner that was given back for good: refused. {-1}: it was given back before.
_ACQUIRE = f"""
local owner, mode, ttl, min_hold = ARGV[2], ARGV[3], ARGV[4], ARGV[5]
local known = redis.call('HMGET', record, 'token', 'mode', 'available', 'revoked', 'ended')
local is_revoked = string.find(known[4] or '', owner, 1, true)
local is_late = string.find(known[5] or '', owner, 1, true)

-- Nearly always there are neither holders nor waiters.
if not is_revoked and not is_late and number(known[3]) <= now and redis.call('EXISTS', holders, queue) == 0 then
  {_GRANT}
  return {{1, tonumber(token)}}
end
{_FUNCTIONS}
expire()
local ends = redis.call('ZSCORE', holders, owner)
if ends then
  redis.call('ZADD', holders, math.max(tonumber(ends), now + ttl), owner)
  return {{1, (described(owner))}}
end
if is_revoked then return busy() end
if is_late then return {{-1}} end

local function is_free()
  if number(known[3]) > now then return false end
  return redis.call('ZCARD', holders) == 0 or (mode == 's' and known[2] == 's')
end

local function is_behind()
  if mode == 'x' and ARGV[9] == '' then return false end
  local behind = false
  each_waiter(function(other, who)
    if who == owner then return true end
    behind = mode == 'x' or other == 'x'
    return behind
  end)
  return behind
end

if is_free() and not is_behind() then
  {_GRANT}
  if redis.call('EXISTS', queue) == 1 then leave(owner) end
  return {{1, tonumber(token)}}
end

{_QUEUE}
return busy()
"""

# Asks for one of several places, once.
# KEYS: queue, alive, and for each place record, holders and what min_hold reserves.
# ARGV: as for one lock, and the place to begin with. Returns {1, token, place}, or as for one lock, of the place
# that is free first. The same owner again: the same place.
_ACQUIRE_PLACE = f"""
local owner, mode, ttl, min_hold, limit = ARGV[2], 'x', ARGV[4], ARGV[5], (#KEYS - 2) / 3
local known, free, soonest, is_revoked, is_late
local numbers_free = 0

local function look_at(place)
  record, holders, reserved = KEYS[3 * place + 3], KEYS[3 * place + 4], KEYS[3 * place + 5]
  known = redis.call('HMGET', record, 'token', 'mode', 'available', 'revoked', 'ended')
end

for i = 0, limit - 1 do
  local place = (tonumber(ARGV[10]) + i) % limit
  look_at(place)
  expire()
  local ends = redis.call('ZSCORE', holders, owner)
  if ends then
    redis.call('ZADD', holders, math.max(tonumber(ends), now + ttl), owner)
    return {{1, (described(owner)), place}}
  end
  is_revoked = is_revoked or string.find(known[4] or '', owner, 1, true)
  is_late = is_late or string.find(known[5] or '', owner, 1, true)
  if number(known[3]) <= now and redis.call('ZCARD', holders) == 0 then
    free, numbers_free = free or place, numbers_free + 1
  else
    local found = busy()
    if not soonest or found[3] < soonest[3] then soonest = found end
  end
end
if is_revoked then return soonest or {{0, '', -1}} end
if is_late then return {{-1}} end

local is_behind = false
if ARGV[9] ~= '' then
  each_waiter(function(_, who)
    is_behind = who ~= owner
    return true
  end)
end

if free and not is_behind then
  look_at(free)
  {_GRANT}
  if redis.call('EXISTS', queue) == 1 then
    leave(owner)
    if numbers_free > 1 then
      each_waiter(function(_, who)
        ring(who)
        return true
      end)
    end
  end
  return {{1, tonumber(token), free}}
end
{_QUEUE}
return soonest or {{0, '', -1}}
"""

# Gives back what an owner holds, and wakes who is next.
# ARGV: bells, owner, '1' to refuse this owner from now on, whatever arrives late, and take it from the queue,
# min_hold (microseconds). Returns 1 released (also when asked again), 0 it was gone, 2 gone and somebody else has it.
_RELEASE = f"""
-- Keeps the last eight: as many readers may give back at once, and ask again.
local function note(list, owner)
  local noted = redis.call('HGET', record, list) or ''
  redis.call('HSET', record, list, string.sub(owner .. ' ' .. noted, 1, 8 * (#owner + 1)))
end
local owner, is_final = ARGV[2], ARGV[3] == '1'

-- Nearly always nobody waits, and no lease has ended.
if not is_final and ARGV[4] == '0' and redis.call('EXISTS', queue) == 0 and
  redis.call('ZCOUNT', holders, '-inf', instant) == 0 and redis.call('ZREM', holders, owner) == 1 then
  redis.call('HDEL', record, 'h:' .. owner)
  note('ended', owner)
  return 1
end
{_FUNCTIONS}
local ends = number(redis.call('ZSCORE', holders, owner))
if is_final then leave(owner) end
if ends > now then
  if ARGV[4] ~= '0' then
    local _, acquired = described(owner)
    hold_back(acquired + ARGV[4])
  end
  forget(owner)
  note('ended', owner)
  if is_final and not is_noted('revoked', owner) then note('revoked', owner) end
  wake()
  return 1
end
expire()
local answer = redis.call('ZCARD', holders) > 0 and 2 or 0
if is_noted('ended', owner) then answer = 1 end
if is_final and not is_noted('revoked', owner) then
  note('revoked', owner)
  keep(now)
end
if answer == 0 or is_final then wake() end
return answer
"""

# Lets leases live longer, never shorter, if they are still their owner's.
# KEYS: record and holders of each lock. ARGV of each: owner, ttl (microseconds).
# Returns 1 or 0 for each. Needs nothing of the above.
_EXTEND = f"""
local clock = redis.call('TIME')
local now = clock[1] * 1000000 + clock[2]
local kept = {{}}
for i = 1, #KEYS / 2 do
  local record, holders, owner, ttl = KEYS[2 * i - 1], KEYS[2 * i], ARGV[2 * i - 1], tonumber(ARGV[2 * i])
  local ends = tonumber(redis.call('ZSCORE', holders, owner) or 0)
  kept[i] = ends > now and 1 or 0
  -- Redis refuses to begin with ZADD, not to go on with it, when its memory is full: this needs none.
  if i == 1 then redis.call('ZREM', holders, '') end
  if ends > now and ends < now + ttl then
    redis.call('ZADD', holders, string.format('%.0f', now + ttl), owner)
    local left = math.ceil(ttl / 1000) + {RETENTION * 1000}
    for _, key in ipairs({{record, holders}}) do
      if redis.call('PTTL', key) < left - 600000 then redis.call('PEXPIRE', key, string.format('%.0f', left)) end
    end
  end
end
return kept
"""

# Has an owner hold what another one holds, with the same token, for its own ttl from now.
# ARGV: bells, new owner, former owner, ttl (microseconds), holder.
# Returns 1 if it is the new owner's now (also when asked again: what is written then waits for replicas and the disk
# again), or 0. An owner that was given back for good: 0.
_TAKE_OVER = """
local owner, former, ends = ARGV[2], ARGV[3], now + tonumber(ARGV[4])
if is_noted('revoked', owner) then return 0 end
expire()
local last = redis.call('ZSCORE', holders, owner)
if last then
  -- As in EXTEND.
  redis.call('ZREM', holders, '')
  redis.call('ZADD', holders, math.max(tonumber(last), ends), owner)
  return 1
end
if not redis.call('ZSCORE', holders, former) then return 0 end
local token, acquired = described(former)
forget(former)
redis.call('HSET', record, 'h:' .. owner, table.concat({text(token), text(acquired), ARGV[5]}, ' '))
redis.call('ZADD', holders, ends, owner)
keep(ends)
return 1
"""

# Looks, and writes nothing. KEYS: record, holders and alive of each lock.
# Returns for each {name, token, microseconds until min_hold is over or less than 0, waiters, mode}
# and then of each who holds it: owner, microseconds left, microseconds since it was acquired, holder.
_LOOK = """
local answers = {}
for i = 1, #KEYS, 3 do
  record, holders, alive = KEYS[i], KEYS[i + 1], KEYS[i + 2]
  local known = redis.call('HMGET', record, 'name', 'token', 'available', 'mode')
  local waiters = redis.call('ZCOUNT', alive, '(' .. text(now), '+inf')
  local answer = {known[1] or '', number(known[2]), number(known[3]) - now, waiters, known[4] or 'x'}
  local found = redis.call('ZRANGE', holders, 0, -1, 'WITHSCORES')
  for j = 1, #found, 2 do
    local left, _, acquired, holder = tonumber(found[j + 1]) - now, described(found[j])
    if left > 0 then
      answer[#answer + 1] = found[j]
      answer[#answer + 1] = left
      answer[#answer + 1] = now - acquired
      answer[#answer + 1] = holder
    end
  end
  answers[#answers + 1] = answer
end
return answers
"""

# Ends a holding for its operator: with a higher token, and free for others now, whatever min_hold it had.
# ARGV: bells, owner, token: with no owner, what the holding with this token has reserved.
# Returns 1 if it was there, or 0.
_FORCE = """
expire()
local is_reserved = ARGV[2] == '' and redis.call('ZCARD', holders) == 0 and
  redis.call('HGET', record, 'token') == ARGV[3]
if not is_reserved and not redis.call('ZSCORE', holders, ARGV[2]) then return 0 end
forget(ARGV[2])
redis.call('HSET', record, 'token', math.max(number(redis.call('HGET', record, 'token')) + 1, now))
if redis.call('ZCARD', holders) == 0 then redis.call('HDEL', record, 'available') end
keep(now)
wake()
return 1
"""

# Gives up a place in the queue; who is next may have been passed over.
# ARGV: bells, owner. Returns 1 if there was one, or 0.
_LEAVE = """
local left = leave(ARGV[2])
expire()
wake()
return left
"""

# Keeps the places of waiters who are known to be alive. Rings those who have none any more, and, if
# the lock is free, who is next: a ring may have been lost, or the holder's lease may have ended.
# ARGV: bells, and mode and owner of each, as one word.
_KEEP = f"""
for i = 2, #ARGV do
  if redis.call('ZSCORE', queue, ARGV[i]) then
    redis.call('ZADD', alive, now + {PATIENCE * 1e6:.0f}, ARGV[i])
  else
    ring(string.sub(ARGV[i], 2))
  end
end
redis.call('PEXPIRE', queue, 60000)
redis.call('PEXPIRE', alive, 60000)
expire()
if number(redis.call('HGET', record, 'available')) <= now then wake() end
return 1
"""


class Script:
    """A script by its name; Redis knows it by *sha*."""

    def __init__(self, name: str, text: str) -> None:
        self.name, self.text = name, text
        self.sha = hashlib.sha1(text.encode(), usedforsecurity=False).hexdigest()


ACQUIRE = Script("acquire", _OF_LOCK + _ACQUIRE)
ACQUIRE_PLACE = Script(
    "acquire_place",
    f"{_CLOCK}local record, holders, reserved, queue, alive, bells = nil, nil, nil, KEYS[1], KEYS[2], ARGV[1]\n"
    + _FUNCTIONS
    + _ACQUIRE_PLACE,
)
RELEASE = Script("release", _OF_LOCK + _RELEASE)
EXTEND = Script("extend", _EXTEND)
TAKE_OVER = Script("take_over", _OF_LOCK + _FUNCTIONS + _TAKE_OVER)
LOOK = Script("look", _OF_LOCK + _FUNCTIONS + _LOOK)
FORCE = Script("force", _OF_LOCK + _FUNCTIONS + _FORCE)
LEAVE = Script("leave", _OF_LOCK + _FUNCTIONS + _LEAVE)
KEEP = Script("keep", _OF_LOCK + _FUNCTIONS + _KEEP)
SCRIPTS = (ACQUIRE, ACQUIRE_PLACE, RELEASE, EXTEND, TAKE_OVER, LOOK, FORCE, LEAVE, KEEP)


class Call(NamedTuple):
    """A script with what it is to work on."""

    script: Script
    keys: tuple[str, ...]
    args: tuple[str | int | bytes, ...]

    @property
    def by_sha(self) -> tuple[str | int | bytes, ...]:
        return ("EVALSHA", self.script.sha, len(self.keys), *self.keys, *self.args)

    @property
    def by_text(self) -> tuple[str | int | bytes, ...]:
        return ("EVAL", self.script.text, len(self.keys), *self.keys, *self.args)
