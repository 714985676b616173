"""The Lua scripts, each with its contract: what Redis carries out as one step.

Redis 6.0 or later, or Valkey. Instants are microseconds of the server's clock (TIME). A lock has

- *record*, a hash: ``token``, the last one given; ``lease``, "since lasts owner" of an exclusive lease: the instant at
  which it began or was extended, and for how many microseconds; ``holder``, "token acquired holder" of that lease;
  ``h:OWNER``, the same of each owner that shares the lock; ``available``, the instant from which others may have it if
  min_hold reserved it; ``name``; ``ended``, the last owners that released it; ``revoked``, the last owners that were given
  up for good: late requests of theirs are refused;
- *readers*, a sorted set: the owners that share it, by the instant at which their lease ends;
- *queue*, a sorted set: waiter (mode and position) by ticket; *alive*: waiter by the end of its patience;
- a *doorbell* for each waiter, the list *bells* + position, which it blocks on.

A position is that of a process, whose callers wait in it one after the other. A mode is x (exclusive) or s (shared).

Each place of a lock with a limit has a record of its own; the queue, ``alive`` and the doorbells are those of all its places.

The record outlives its lock by RETENTION: so tokens rise though the clock may step back, and an
answer can be given twice.

Each command costs a script about a microsecond, and each field, argument and text that it reads or makes a tenth of it.

A cluster that is moving the slot refuses a script before it has begun, by its KEYS, but a key that a script has emptied is
an error: ``redis.pcall`` where that may be. Doorbells are not among KEYS, as only the server knows who waits: one that cannot be
reached at that moment does not ring.
"""

from __future__ import annotations

import hashlib
from typing import NamedTuple

#: Seconds for which the record of a free lock is kept.
RETENTION = 2 * 3600
#: Letters of an owner in the lists of the last owners: enough to tell all owners apart.
MARK = 16
#: Letters of a list of the last eight owners: so many readers may release at once, and repeat their requests.
LAST = 8 * (MARK + 1)
#: Seconds without a request of a waiter after which others are served before it.
PATIENCE = 0.5
#: Seconds of silence after which a waiter loses its position for good.
FORGOTTEN = 10.0
#: How many waiters a script looks at: if so many died within ten seconds, those behind them are not rung, and look again.
FIRST = 64

# Tries once to acquire the lock.
# KEYS: record, readers, queue, alive.
# ARGV: bells, owner, mode, ttl, min_hold (microseconds), name, holder, '1' to get a position in the queue after a
# refusal, '1' if the first in the queue is always served first, the position in the queue, '1' for a place.
# Returns the token as text, which costs less than a table; or, after a refusal, {holder of the lease that ends last,
# microseconds left or -1}. The same owner gets the same token again. A revoked owner is refused.
# nil: this owner has already released the lock.
_ACQUIRE = f"""
local record, readers, queue, owner, mode, ttl, min_hold = KEYS[1], KEYS[2], KEYS[3], ARGV[2], ARGV[3], ARGV[4], ARGV[5]
local clock = redis.call('TIME')
local instant = clock[1] .. (#clock[2] == 6 and clock[2] or string.sub('00000' .. clock[2], -6))
local now = instant + 0
local known = redis.call('HMGET', record, 'token', 'lease', 'available', 'revoked', 'ended')
local latest, lease, available = known[1] or 0, known[2] or '', known[3] or 0
local mark = string.sub(owner, 1, {MARK})
local is_revoked = known[4] and string.find(known[4], mark, 1, true)
local is_late = known[5] and string.find(known[5], mark, 1, true)
local token, acquired = instant, instant
if latest - now >= 0 then token = string.format('%.0f', latest + 1) end
latest = token

-- Nearly always nobody holds the lock or waits for it.
if is_revoked or is_late or lease ~= '' or available - now > 0 or redis.call('EXISTS', readers, queue) > 0 then
  local alive, bells, position = KEYS[4], ARGV[1], ARGV[10]
  -- When the lease of this owner ends, and that which ends last, with the field that describes its holder.
  local since, lasts, holder = string.match(lease, '^(%d+) (%d+) (.*)$')
  local mine, ends, field = 0, (since or 0) + (lasts or 0), 'holder'
  if ends > now then
    mine = holder == owner and ends or 0
  else
    for _, gone in ipairs(redis.call('ZRANGEBYSCORE', readers, '-inf', instant)) do
      redis.call('ZREM', readers, gone)
      redis.call('HDEL', record, 'h:' .. gone)
    end
    local last = redis.pcall('ZREVRANGE', readers, 0, 0, 'WITHSCORES')
    ends, field = (last[2] or 0) + 0, 'h:' .. (last[1] or '')
    mine = last[1] and redis.call('ZSCORE', readers, owner) or 0
  end
  local is_alone = ends > now and field == 'holder'

  if mine - now > 0 then
    -- It is asked again: no lease becomes shorter.
    mode, field = is_alone and 'x' or 's', is_alone and 'holder' or 'h:' .. owner
    token, acquired = string.match(redis.call('HGET', record, field), '^(%d+) (%d+)')
    latest, ttl, min_hold = known[1], string.format('%.0f', math.max(mine - now, ttl)), '0'
  elseif is_late and not is_revoked then
    return false
  else
    local is_refused = is_revoked or available - now > 0 or is_alone or ends > now and mode == 'x'
    -- Readers do not pass a writer; writers pass anybody, unless the order counts.
    if not is_refused and (mode == 's' or ARGV[9] ~= '') then
      for _, waiter in ipairs(redis.call('ZRANGE', queue, 0, {FIRST - 1})) do
        if string.sub(waiter, 2) == position then break end
        if (mode == 'x' or string.sub(waiter, 1, 1) == 'x') and (redis.call('ZSCORE', alive, waiter) or 0) - now > 0 then
          is_refused = true
          break
        end
      end
    end
    if is_refused then
      if ARGV[8] ~= '' and not is_revoked then
        -- As in ENQUEUE.
        local waiter, last = mode .. position, redis.call('ZRANGE', queue, -1, -1, 'WITHSCORES')
        redis.call('ZADD', queue, 'NX', math.max((last[2] or 0) + 1, now), waiter)
        redis.call('ZADD', alive, now + {PATIENCE * 1e6:.0f}, waiter)
        for _, gone in ipairs(redis.call('ZRANGEBYSCORE', alive, '-inf', now - {FORGOTTEN * 1e6:.0f})) do
          redis.call('ZREM', queue, gone)
          redis.call('ZREM', alive, gone)
        end
        redis.call('PEXPIRE', queue, 60000)
        redis.call('PEXPIRE', alive, 60000)
      end
      holder = ends > now and string.match(redis.call('HGET', record, field) or '', '^%d+ %d+ (.*)$') or ''
      ends = math.max(ends, available)
      return {{holder, ends > now and ends - now or -1}}
    end
    if redis.call('EXISTS', queue) == 1 then
      redis.call('ZREM', queue, 'x' .. position, 's' .. position)
      redis.call('ZREM', alive, 'x' .. position, 's' .. position)
      redis.pcall('DEL', bells .. position)
      -- Several places may be free: each one that is taken rings the next waiter.
      for _, waiter in ipairs(ARGV[11] == '1' and redis.pcall('ZRANGE', queue, 0, {FIRST - 1}) or {{}}) do
        if (redis.call('ZSCORE', alive, waiter) or 0) - now > 0 then
          local bell = bells .. string.sub(waiter, 2)
          if redis.pcall('EXISTS', bell) == 0 then
            redis.call('RPUSH', bell, 1)
            redis.call('PEXPIRE', bell, 10000)
          end
          break
        end
      end
    end
  end
end

-- It is granted. Texts are joined, as to format a number takes as long as a command.
local described = token .. ' ' .. acquired .. ' ' .. ARGV[7]
if mode == 'x' then
  redis.call('HSET', record, 'token', latest, 'lease', instant .. ' ' .. ttl .. ' ' .. owner, 'holder', described)
  if min_hold ~= '0' then redis.call('HSET', record, 'available', now + min_hold) end
else
  redis.call('HSET', record, 'token', latest, 'lease', '', 'h:' .. owner, described)
  redis.call('ZADD', readers, now + ttl, owner)
end
if not known[1] then redis.call('HSET', record, 'name', ARGV[6]) end
-- It is kept longer, so that one grant in ten minutes need say so.
if mode == 's' or min_hold ~= '0' or ttl - 6e8 > 0 or math.floor((known[1] or 0) / 6e8) ~= math.floor(now / 6e8) then
  local left = math.ceil(math.max(ttl, min_hold) / 1000) + {(RETENTION + 1200) * 1000}
  for i = 1, mode == 's' and 2 or 1 do
    if redis.call('PTTL', KEYS[i]) < left - 600000 then redis.call('PEXPIRE', KEYS[i], left) end
  end
end
return token
"""

# Takes a position in the queue for any place of a lock, or keeps it.
# KEYS: record, readers, queue, alive. ARGV: bells, position.
_ENQUEUE = f"""
local queue, alive, waiter = KEYS[3], KEYS[4], 'x' .. ARGV[2]
local clock = redis.call('TIME')
local now = clock[1] * 1000000 + clock[2]
local last = redis.call('ZRANGE', queue, -1, -1, 'WITHSCORES')
redis.call('ZADD', queue, 'NX', math.max((last[2] or 0) + 1, now), waiter)
redis.call('ZADD', alive, now + {PATIENCE * 1e6:.0f}, waiter)
for _, gone in ipairs(redis.call('ZRANGEBYSCORE', alive, '-inf', now - {FORGOTTEN * 1e6:.0f})) do
  redis.call('ZREM', queue, gone)
  redis.call('ZREM', alive, gone)
end
redis.call('PEXPIRE', queue, 60000)
redis.call('PEXPIRE', alive, 60000)
return 1
"""

# Releases the lock of an owner, and wakes the next waiter.
# KEYS: record, readers, queue, alive.
# ARGV: bells ('': wakes nobody), owner, '1' to revoke this owner: late requests of it are refused, min_hold
# (microseconds); the last two may be left out.
# Returns 1: released (also when repeated), 0: nobody held the lock, 2: somebody else holds it.
_RELEASE = f"""
local record, readers, queue, alive, bells = KEYS[1], KEYS[2], KEYS[3], KEYS[4], ARGV[1]
local owner, is_final = ARGV[2], ARGV[3] == '1'
local clock = redis.call('TIME')
local now = clock[1] * 1000000 + clock[2]
local known = redis.call('HMGET', record, 'lease', 'ended', 'available')
local since, lasts, holder = string.match(known[1] or '', '^(%d+) (%d+) (.*)$')
local mark = string.sub(owner, 1, {MARK})
local ended = string.sub(mark .. ' ' .. (known[2] or ''), 1, {LAST})
local is_alone, answer, field, last = (since or 0) + (lasts or 0) - now > 0, 0, 'holder', {{}}

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
    local left = math.ceil((available - now) / 1000) + {RETENTION * 1000}
    if redis.call('PTTL', record) < left - 600000 then redis.call('PEXPIRE', record, left) end
  end
elseif answer == 1 and field == 'holder' and known[3] then
  redis.call('HDEL', record, 'available') -- it was never used: its own min_hold, of when it was granted
end
if field ~= 'holder' then redis.call('HDEL', record, field) end
if is_final then
  local revoked = redis.call('HGET', record, 'revoked') or ''
  if not string.find(revoked, mark, 1, true) then
    redis.call('HSET', record, 'revoked', string.sub(mark .. ' ' .. revoked, 1, {LAST}))
    if redis.call('PTTL', record) < {(RETENTION - 600) * 1000} then redis.call('PEXPIRE', record, {RETENTION * 1000}) end
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
for _, waiter in ipairs(redis.call('ZRANGE', queue, 0, {FIRST - 1})) do
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
"""

# Extends leases that their owners still hold, and never shortens them.
# KEYS: for each lock the record, and for a shared lock the readers: of an exclusive lock this key does not exist, and
# a cluster that is moving the slot would refuse it. ARGV for each: owner, ttl (microseconds), mode.
# Returns 1 (held) or 0 for each.
_EXTEND = f"""
local clock = redis.call('TIME')
local now = clock[1] * 1000000 + clock[2]
local kept, key = {{}}, 1
-- Redis refuses to begin with HSET, not to go on with it, when its memory is full: this needs none.
redis.call('HDEL', KEYS[1], '')
for i = 1, #ARGV - 2, 3 do
  local owner, ttl, keys = ARGV[i], ARGV[i + 1], {{KEYS[key], ARGV[i + 2] == 's' and KEYS[key + 1] or nil}}
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
    local left = math.ceil(ttl / 1000) + {RETENTION * 1000}
    for _, each in ipairs(keys) do
      -- Nearly as long is long enough, and saves a write.
      if redis.call('PTTL', each) < left - 600000 then redis.call('PEXPIRE', each, left) end
    end
  end
end
return kept
"""

# Moves a holding from the former owner to a new one, with the same token, for *ttl* from now.
# KEYS: record, readers, queue, alive. ARGV: bells, new owner, former owner, ttl (microseconds), holder.
# Returns 1 if the new owner holds the lock now (a repetition writes again, so that replicas and disk can confirm it),
# or 0, also for a revoked new owner.
_TAKE_OVER = f"""
local record, readers, owner, former, ttl = KEYS[1], KEYS[2], ARGV[2], ARGV[3], ARGV[4]
local clock = redis.call('TIME')
local now = clock[1] * 1000000 + clock[2]
local known = redis.call('HMGET', record, 'lease', 'revoked')
if string.find(known[2] or '', string.sub(owner, 1, {MARK}), 1, true) then return 0 end

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
local left = math.ceil(ttl / 1000) + {RETENTION * 1000}
for i = 1, is_alone and 1 or 2 do
  if redis.call('PTTL', KEYS[i]) < left - 600000 then redis.call('PEXPIRE', KEYS[i], left) end
end
return 1
"""

# Looks at locks, and writes nothing. KEYS: record, readers and alive of each lock.
# Returns for each lock nil if it is free, or {name, token, microseconds until min_hold is over or less than 0, waiters,
# mode} and then for each holder: owner, microseconds left, microseconds since the grant, holder.
_LOOK = """
local clock = redis.call('TIME')
local now = clock[1] * 1000000 + clock[2]
local answers = {}
for i = 1, #KEYS, 3 do
  local record, readers, alive = KEYS[i], KEYS[i + 1], KEYS[i + 2]
  local known = redis.call('HMGET', record, 'name', 'token', 'available', 'lease')
  local since, lasts, holder = string.match(known[4] or '', '^(%d+) (%d+) (.*)$')
  local found, mode = {holder, (since or 0) + (lasts or 0)}, 'x'
  if found[2] <= now then
    found = redis.call('ZRANGE', readers, 0, -1, 'WITHSCORES')
    mode = found[1] and 's' or 'x'
  end
  local answer = {known[1] or '', (known[2] or 0) + 0, (known[3] or 0) - now, 0, mode}
  for j = 1, #found, 2 do
    local left = found[j + 1] - now
    if left > 0 then
      local described = redis.call('HGET', record, mode == 's' and 'h:' .. found[j] or 'holder') or ''
      local acquired, holder = string.match(described, '^%d+ (%d+) (.*)$')
      for _, each in ipairs({found[j], left, now - (acquired or 0), holder or ''}) do answer[#answer + 1] = each end
    end
  end
  local is_free = #answer == 5 and answer[3] <= 0
  if not is_free then answer[4] = redis.call('ZCOUNT', alive, string.format('(%.0f', now), '+inf') end
  answers[#answers + 1] = not is_free and answer
end
return answers
"""

# Ends a holding for an operator: raises the token, and frees the lock at once, without its min_hold. Rings nobody.
# KEYS: record, readers, queue, alive.
# ARGV: bells, owner, token. With '' as owner, ends the reservation (min_hold) of the holding with this token.
# Returns 1 if there was such a holding, or 0.
_FORCE = f"""
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
if redis.call('PTTL', record) < {(RETENTION - 600) * 1000} then redis.call('PEXPIRE', record, {RETENTION * 1000}) end
return 1
"""

# Gives up a position in the queue, unless it is '', and wakes the next waiter, whose ring may have gone to this one.
# KEYS: record, readers, queue, alive. ARGV: bells, position. Returns 1 if there was such a position, or 0.
_LEAVE = f"""
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
for _, waiter in ipairs(redis.pcall('ZRANGE', queue, 0, {FIRST - 1})) do
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
"""

# Gives an exclusive holding another token, for Redlock; later tokens of this server are higher.
# KEYS: record, readers, queue, alive. ARGV: bells, owner, token.
# Returns 1 if this owner holds the lock on this server; otherwise writes nothing and returns 0.
_RAISE = """
local clock = redis.call('TIME')
local now = clock[1] * 1000000 + clock[2]
local known = redis.call('HMGET', KEYS[1], 'token', 'lease', 'holder')
local since, lasts, owner = string.match(known[2] or '', '^(%d+) (%d+) (.*)$')
if owner ~= ARGV[2] or since + lasts - now <= 0 then return 0 end
local acquired, holder = string.match(known[3], '^%d+ (%d+) (.*)$')
local latest = string.format('%.0f', math.max(known[1], ARGV[3]))
redis.call('HSET', KEYS[1], 'token', latest, 'holder', ARGV[3] .. ' ' .. acquired .. ' ' .. holder)
return 1
"""


class Script:
    """A script with its name; *sha* identifies it in Redis."""

    def __init__(self, name: str, text: str) -> None:
        self.name, self.text = name, text
        self.sha = hashlib.sha1(text.encode(), usedforsecurity=False).hexdigest()


ACQUIRE = Script("acquire", _ACQUIRE)
ENQUEUE = Script("enqueue", _ENQUEUE)
RELEASE = Script("release", _RELEASE)
EXTEND = Script("extend", _EXTEND)
TAKE_OVER = Script("take_over", _TAKE_OVER)
LOOK = Script("look", _LOOK)
FORCE = Script("force", _FORCE)
LEAVE = Script("leave", _LEAVE)
RAISE = Script("raise", _RAISE)
SCRIPTS = (ACQUIRE, ENQUEUE, RELEASE, EXTEND, TAKE_OVER, LOOK, FORCE, LEAVE, RAISE)


class Call(NamedTuple):
    """A script with its keys and arguments."""

    script: Script
    keys: tuple[str, ...]
    args: tuple[str | int | bytes, ...]

    @property
    def by_sha(self) -> tuple[str | int | bytes, ...]:
        return ("EVALSHA", self.script.sha, len(self.keys), *self.keys, *self.args)

    @property
    def by_text(self) -> tuple[str | int | bytes, ...]:
        return ("EVAL", self.script.text, len(self.keys), *self.keys, *self.args)
