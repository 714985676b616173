"""The Lua scripts, each with its contract: what Redis carries out as one step.

Redis 6.0 or later, or Valkey. Instants are microseconds of the server's clock (TIME). A lock has

- *record*, a hash: ``token`` the last one given, ``mode`` x (exclusive) or s (shared), ``available``
  the instant from which others may have it, if min_hold reserved it, ``name``, ``ended`` the last owners that gave it back,
  ``revoked`` the last ones that are refused from now on; ``owner``, ``since`` and ``lasts``, the instant from which its lease
  lasts so many microseconds, and ``holder``: "token acquired holder", of who has it alone; and ``h:OWNER``, as ``holder``, of each who shares it;
- *readers*, a sorted set: those who share it, by the instant the lease ends;
- *queue*, a sorted set: waiter (mode and position) by ticket; *alive*: waiter by the end of its patience;
- a *doorbell* for each waiter, the list ``BELLS`` + position, which it blocks on.

A position is that of a process, whose callers wait in it one after the other.

Each place of a lock with a limit has a record of its own; the queue, ``alive`` and the doorbells are those of all its places.

The record outlives its lock by RETENTION: so tokens rise though the clock may step back, and an
answer can be given twice.
"""

from __future__ import annotations

import hashlib
from typing import NamedTuple

#: Seconds for which what is known of a free lock is kept.
RETENTION = 2 * 3600
#: Letters of an owner by which it is known as one of the last.
MARK = 16
#: Letters of a list of the last eight owners, as many readers may give back at once, and ask again.
LAST = 8 * (MARK + 1)
#: Seconds without a word from a waiter after which others are served before it.
PATIENCE = 0.5
#: Seconds of silence after which a waiter loses its place for good.
FORGOTTEN = 10.0

_CLOCK = """
local clock = redis.call('TIME')
local now = clock[1] * 1000000 + clock[2]
"""
# Commands are given numbers as they are; joined to text, Lua itself would write 1.76e+15.
_NUMBERS = """
local function text(number) return string.format('%.0f', number) end
local function number(value) return tonumber(value or 0) or 0 end
"""
#: The server's clock, and numbers from and to text.
CLOCK = _CLOCK + _NUMBERS

# KEYS: record, readers, queue, alive. ARGV[1]: what the names of doorbells begin with. A cluster that is moving the slot
# refuses a script before it has begun, by its KEYS; doorbells are not among them, as only the server knows who waits: one
# that cannot be reached at that moment does not ring.
_OF_LOCK = f"""{_CLOCK}
local record, readers, queue, alive, bells = KEYS[1], KEYS[2], KEYS[3], KEYS[4], ARGV[1]
"""

# Each command takes about a microsecond, and each function is defined again in each run. So if nobody is in the way,
# scripts return before they come to these functions.
_FUNCTIONS = f"""{_NUMBERS}
local function keep(key, ends)
  local left = math.max(0, math.ceil((ends - now) / 1000)) + {RETENTION * 1000}
  -- Nearly as long is long enough, and saves a write.
  if redis.call('PTTL', key) < left - 600000 then redis.call('PEXPIRE', key, left) end
end

-- When the lease of this owner ends, 0 if it has none, and the field that describes it.
local function lease_of(owner)
  local known = redis.call('HMGET', record, 'mode', 'owner', 'since', 'lasts')
  local ends, field = known[2] == owner and number(known[3]) + number(known[4]) or 0, 'holder'
  if known[1] == 's' then
    ends, field = readers and number(redis.call('ZSCORE', readers, owner)) or 0, 'h:' .. owner
  end
  return ends > now and ends or 0, field
end

local function hold(owner, ends, field)
  if field == 'holder' then
    redis.call('HSET', record, 'owner', owner, 'since', now, 'lasts', ends - now)
  else
    redis.call('ZADD', readers, ends, owner)
    keep(readers, ends)
  end
  keep(record, ends)
end

local function forget(owner, field)
  if field == 'holder' then
    redis.call('HDEL', record, 'since')
  else
    redis.call('ZREM', readers, owner)
    redis.call('HDEL', record, field)
  end
end

local function expire()
  for _, owner in ipairs(redis.call('ZRANGEBYSCORE', readers, '-inf', now)) do
    forget(owner, 'h:' .. owner)
  end
end

local function described(field)
  local known = redis.call('HGET', record, field) or ''
  local token, acquired, holder = string.match(known, '^(%d+) (%d+) (.*)$')
  return number(token), number(acquired), holder or ''
end

-- Which lease ends last, x or s for how it is held, and the field that describes it; 0 if nobody has the lock.
local function last_lease()
  local known = redis.call('HMGET', record, 'mode', 'since', 'lasts')
  local ends, field = number(known[2]) + number(known[3]), 'holder'
  if known[1] == 's' then
    -- With its last holder the key is gone, which a cluster that is moving the slot reports as an error.
    local last = redis.pcall('ZREVRANGE', readers, 0, 0, 'WITHSCORES')
    ends, field = number(last[2]), 'h:' .. (last[1] or '')
  end
  return ends > now and ends or 0, known[1], field
end

local function hold_back(instant)
  if instant > now and instant > number(redis.call('HGET', record, 'available')) then
    redis.call('HSET', record, 'available', instant)
    keep(record, instant)
  end
end

-- Calls visit(mode, position) for each waiter that is alive, in the order of tickets, until it says true.
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

local function ring(position)
  local bell = bells .. position
  if redis.pcall('EXISTS', bell) == 0 then
    redis.call('RPUSH', bell, 1)
    redis.call('PEXPIRE', bell, 10000)
  end
end

-- Wakes the first writer, or all readers before the first writer; with readers inside, no writer.
local function wake()
  if redis.call('EXISTS', queue) == 0 then return end
  local ends, mode = last_lease()
  if ends > 0 and mode == 'x' then return end
  local is_first = true
  each_waiter(function(other, position)
    if other == 'x' then
      if is_first and ends == 0 then ring(position) end
      return true
    end
    is_first = false
    ring(position)
  end)
end

local function leave(position)
  local left = redis.call('ZREM', queue, 'x' .. position, 's' .. position)
  if left > 0 then redis.call('ZREM', alive, 'x' .. position, 's' .. position) end
  redis.pcall('DEL', bells .. position)
  return left
end

local function busy()
  local ends, _, field = last_lease()
  local holder = ends > 0 and select(3, described(field)) or ''
  ends = math.max(ends, number(redis.call('HGET', record, 'available')))
  return {{holder, ends > now and ends - now or -1}}
end
"""

# Gives *waiter* (mode and position) a place at the end of the queue, or keeps the one that it has.
_QUEUE = f"""
  local last = redis.call('ZRANGE', queue, -1, -1, 'WITHSCORES')
  redis.call('ZADD', queue, 'NX', math.max(number(last[2]) + 1, now), waiter)
  redis.call('ZADD', alive, now + {PATIENCE * 1e6:.0f}, waiter)
  for _, gone in ipairs(redis.call('ZRANGEBYSCORE', alive, '-inf', now - {FORGOTTEN * 1e6:.0f})) do
    redis.call('ZREM', queue, gone)
    redis.call('ZREM', alive, gone)
  end
  redis.call('PEXPIRE', queue, 60000)
  redis.call('PEXPIRE', alive, 60000)
"""

# Grants a free lock to this owner. *known*: the record's token, mode, and more.
_GRANT = f"""
  -- To join text, and to say two that are at hand, costs less than to format a number.
  local instant = clock[1] .. string.sub('00000' .. clock[2], -6)
  local token, left = instant, ttl
  if (known[1] or 0) - now >= 0 then token = string.format('%.0f', known[1] + 1) end
  local holder = token .. ' ' .. instant .. ' ' .. ARGV[7]
  if known[2] ~= mode then redis.call('HSET', record, 'mode', mode, 'name', ARGV[6], 'since', 0) end
  if mode == 'x' then
    redis.call('HSET', record, 'token', token, 'owner', owner, 'since', instant, 'lasts', ttl, 'holder', holder)
  else
    redis.call('HSET', record, 'token', token, 'h:' .. owner, holder)
    redis.call('ZADD', readers, now + ttl, owner)
  end
  if mode == 'x' and min_hold ~= '0' then
    redis.call('HSET', record, 'available', now + min_hold)
    left = math.max(ttl, min_hold)
  end
  left = math.ceil(left / 1000) + {RETENTION * 1000}
  -- Nearly as long is long enough, and saves a write.
  if redis.call('PTTL', record) < left - 600000 then redis.call('PEXPIRE', record, left) end
  if mode == 's' and redis.call('PTTL', readers) < left - 600000 then redis.call('PEXPIRE', readers, left) end
"""

# Asks for the lock, once.
# ARGV: bells, owner, mode, ttl, min_hold (microseconds), name, holder, '1' to have a place in the queue if it is
# refused, '1' if the first in the queue is always served first, its position in the queue, '1' if it is for a place.
# Returns the token as text, which costs less than a table; or, if it is refused, {holder of the lease that ends last,
# microseconds left or -1}. The same owner again: the same token. An owner that was given back for good: refused.
# nil: it was given back before.
_ACQUIRE = f"""
local owner, mode, ttl, min_hold = ARGV[2], ARGV[3], ARGV[4], ARGV[5]
local known = redis.call('HMGET', record, 'token', 'mode', 'available', 'since', 'lasts', 'revoked', 'ended')
local mark = string.sub(owner, 1, {MARK})
local is_revoked = known[6] and string.find(known[6], mark, 1, true)
local is_late = known[7] and string.find(known[7], mark, 1, true)
local is_taken = (known[3] or 0) - now > 0 or (known[4] or 0) + (known[5] or 0) - now > 0

-- Nearly always there are neither holders nor waiters.
if not is_revoked and not is_late and not is_taken and redis.call('EXISTS', readers, queue) == 0 then
  {_GRANT}
  return token
end
{_FUNCTIONS}
if known[2] == 's' then expire() end
local ends, field = lease_of(owner)
if ends > 0 then
  hold(owner, math.max(ends, now + ttl), field)
  return text((described(field)))
end
if is_revoked then return busy() end
if is_late then return false end

local is_free = not is_taken and (known[2] ~= 's' or mode == 's' or redis.call('EXISTS', readers) == 0)

local function is_behind()
  if mode == 'x' and ARGV[9] == '' then return false end
  local behind = false
  each_waiter(function(other, who)
    if who == ARGV[10] then return true end
    behind = mode == 'x' or other == 'x'
    return behind
  end)
  return behind
end

if is_free and not is_behind() then
  {_GRANT}
  if redis.call('EXISTS', queue) == 1 then
    leave(ARGV[10])
    -- Several places may be free: each one that is taken rings the next waiter.
    if ARGV[11] ~= '' then each_waiter(function(_, who) ring(who) return true end) end
  end
  return token
end

if ARGV[8] ~= '' then
  local waiter = mode .. ARGV[10]
  {_QUEUE}
end
return busy()
"""

# Takes a position in the queue for any place of a lock, or keeps it.
# ARGV: bells, position.
_ENQUEUE = f"""
local waiter = 'x' .. ARGV[2]
{_QUEUE}
return 1
"""

# Gives back what an owner holds, and wakes who is next.
# ARGV: bells, owner, '1' to refuse this owner from now on, whatever arrives late,
# min_hold (microseconds). Returns 1 released (also when asked again), 0 it was gone, 2 gone and somebody else has it.
_RELEASE = f"""
local owner, is_final = ARGV[2], ARGV[3] == '1'
local mark = string.sub(owner, 1, {MARK})
local known = redis.call('HMGET', record, 'owner', 'since', 'lasts', 'ended')
local ended = string.sub(mark .. ' ' .. (known[4] or ''), 1, {LAST})

-- Nearly always nobody waits, and the lease has not ended.
if not is_final and ARGV[4] == '0' and known[1] == owner and (known[2] or 0) + (known[3] or 0) - now > 0
    and redis.call('EXISTS', queue) == 0 then
  -- Redis refuses this when its memory is full.
  if type(redis.pcall('HSET', record, 'since', '0', 'ended', ended)) == 'number' then return 1 end
end
{_FUNCTIONS}
local revoked = redis.call('HGET', record, 'revoked') or ''
local is_new = is_final and not string.find(revoked, mark, 1, true)
revoked = string.sub(mark .. ' ' .. revoked, 1, {LAST})
local ends, field = lease_of(owner)
if ends > 0 then
  local _, acquired = described(field)
  -- First, as Redis refuses to begin with HSET when its memory is full.
  forget(owner, field)
  if ARGV[4] ~= '0' then hold_back(acquired + ARGV[4]) end
  redis.call('HSET', record, 'ended', ended)
  if is_new then redis.call('HSET', record, 'revoked', revoked) end
  wake()
  return 1
end
expire()
local answer = last_lease() > 0 and 2 or 0
if string.find(known[4] or '', mark, 1, true) then answer = 1 end
if is_new then
  redis.call('HSET', record, 'revoked', revoked)
  keep(record, now)
end
if answer == 0 or is_final then wake() end
return answer
"""

# Lets leases live longer, never shorter, if they are still their owner's.
# KEYS: of each lock the record, and the readers if it is shared: if it is not, they are not there, and a cluster that is
# moving the slot would refuse it. ARGV of each: owner, ttl (microseconds), mode. Returns 1 or 0 for each.
_EXTEND = f"""{_CLOCK}
local record, readers
{_FUNCTIONS}
local kept, key = {{}}, 1
-- Redis refuses to begin with HSET, not to go on with it, when its memory is full: this needs none.
redis.call('HDEL', KEYS[1], '')
for i = 1, #ARGV - 2, 3 do
  local owner, ends, is_shared = ARGV[i], now + ARGV[i + 1], ARGV[i + 2] == 's'
  record, readers = KEYS[key], is_shared and KEYS[key + 1] or nil
  key = key + (is_shared and 2 or 1)
  local last, field = lease_of(owner)
  kept[#kept + 1] = last > 0 and 1 or 0
  if last > 0 and last < ends then hold(owner, ends, field) end
end
return kept
"""

# Has an owner hold what another one holds, with the same token, for its own ttl from now.
# ARGV: bells, new owner, former owner, ttl (microseconds), holder.
# Returns 1 if it is the new owner's now (also when asked again: what is written then waits for replicas and the disk
# again), or 0. An owner that was given back for good: 0.
_TAKE_OVER = f"""
local owner, former, ends = ARGV[2], ARGV[3], now + ARGV[4]
local revoked = redis.call('HGET', record, 'revoked') or ''
if string.find(revoked, string.sub(owner, 1, {MARK}), 1, true) then return 0 end
expire()
local last, field = lease_of(owner)
if last > 0 then
  -- As in EXTEND.
  redis.call('HDEL', record, '')
  hold(owner, math.max(last, ends), field)
  return 1
end
last, field = lease_of(former)
if last == 0 then return 0 end
local token, acquired = described(field)
forget(former, field)
if field ~= 'holder' then field = 'h:' .. owner end
hold(owner, ends, field)
redis.call('HSET', record, field, table.concat({{text(token), text(acquired), ARGV[5]}}, ' '))
return 1
"""

# Looks, and writes nothing. KEYS: record, readers and alive of each lock.
# Returns for each nil if it is free, or {name, token, microseconds until min_hold is over or less than 0, waiters, mode}
# and then of each who holds it: owner, microseconds left, microseconds since it was acquired, holder.
_LOOK = """
local answers = {}
for i = 1, #KEYS, 3 do
  record, readers, alive = KEYS[i], KEYS[i + 1], KEYS[i + 2]
  local known = redis.call('HMGET', record, 'name', 'token', 'available', 'mode', 'owner', 'since', 'lasts')
  local answer = {known[1] or '', number(known[2]), number(known[3]) - now, 0, known[4] or 'x'}
  local found = {known[5] or '', number(known[6]) + number(known[7])}
  if known[4] == 's' then found = redis.call('ZRANGE', readers, 0, -1, 'WITHSCORES') end
  for j = 1, #found, 2 do
    local left = number(found[j + 1]) - now
    if left > 0 then
      local _, acquired, holder = described(known[4] == 's' and 'h:' .. found[j] or 'holder')
      answer[#answer + 1] = found[j]
      answer[#answer + 1] = left
      answer[#answer + 1] = now - acquired
      answer[#answer + 1] = holder
    end
  end
  local is_free = #answer == 5 and answer[3] <= 0
  if not is_free then answer[4] = redis.call('ZCOUNT', alive, '(' .. text(now), '+inf') end
  answers[#answers + 1] = not is_free and answer
end
return answers
"""

# Ends a holding for its operator: with a higher token, and free for others now, whatever min_hold it had.
# ARGV: bells, owner, token: with no owner, what the holding with this token has reserved.
# Returns 1 if it was there, or 0.
_FORCE = """
expire()
local ends, field = lease_of(ARGV[2])
local token = redis.call('HGET', record, 'token')
local is_reserved = ARGV[2] == '' and last_lease() == 0 and token == ARGV[3]
if ends == 0 and not is_reserved then return 0 end
forget(ARGV[2], field)
redis.call('HSET', record, 'token', math.max(number(token) + 1, now))
if last_lease() == 0 then redis.call('HDEL', record, 'available') end
keep(record, now)
wake()
return 1
"""

# Gives up a position in the queue; who is next may have been passed over.
# ARGV: bells, position. Returns 1 if there was one, or 0.
_LEAVE = """
local left = leave(ARGV[2])
expire()
wake()
return left
"""


class Script:
    """A script by its name; Redis knows it by *sha*."""

    def __init__(self, name: str, text: str) -> None:
        self.name, self.text = name, text
        self.sha = hashlib.sha1(text.encode(), usedforsecurity=False).hexdigest()


ACQUIRE = Script("acquire", _OF_LOCK + _ACQUIRE)
ENQUEUE = Script("enqueue", _OF_LOCK + _NUMBERS + _ENQUEUE)
RELEASE = Script("release", _OF_LOCK + _RELEASE)
EXTEND = Script("extend", _EXTEND)
TAKE_OVER = Script("take_over", _OF_LOCK + _FUNCTIONS + _TAKE_OVER)
LOOK = Script("look", _OF_LOCK + _FUNCTIONS + _LOOK)
FORCE = Script("force", _OF_LOCK + _FUNCTIONS + _FORCE)
LEAVE = Script("leave", _OF_LOCK + _FUNCTIONS + _LEAVE)
SCRIPTS = (ACQUIRE, ENQUEUE, RELEASE, EXTEND, TAKE_OVER, LOOK, FORCE, LEAVE)


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
