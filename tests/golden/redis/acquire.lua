local record, readers, queue, owner, mode, ttl, min_hold = KEYS[1], KEYS[2], KEYS[3], ARGV[2], ARGV[3], ARGV[4], ARGV[5]
local clock = redis.call('TIME')
local instant = clock[1] .. (#clock[2] == 6 and clock[2] or string.sub('00000' .. clock[2], -6))
local now = instant + 0
local known = redis.call('HMGET', record, 'token', 'lease', 'available', 'revoked', 'ended')
local latest, lease, available = known[1] or 0, known[2] or '', known[3] or 0
local mark = string.sub(owner, 1, 16)
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
      for _, waiter in ipairs(redis.call('ZRANGE', queue, 0, 63)) do
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
        redis.call('ZADD', alive, now + 500000, waiter)
        for _, gone in ipairs(redis.call('ZRANGEBYSCORE', alive, '-inf', now - 10000000)) do
          redis.call('ZREM', queue, gone)
          redis.call('ZREM', alive, gone)
        end
        redis.call('PEXPIRE', queue, 60000)
        redis.call('PEXPIRE', alive, 60000)
      end
      holder = ends > now and string.match(redis.call('HGET', record, field) or '', '^%d+ %d+ (.*)$') or ''
      ends = math.max(ends, available)
      return {holder, ends > now and ends - now or -1}
    end
    if redis.call('EXISTS', queue) == 1 then
      redis.call('ZREM', queue, 'x' .. position, 's' .. position)
      redis.call('ZREM', alive, 'x' .. position, 's' .. position)
      redis.pcall('DEL', bells .. position)
      -- Several places may be free: each one that is taken rings the next waiter.
      for _, waiter in ipairs(ARGV[11] == '1' and redis.pcall('ZRANGE', queue, 0, 63) or {}) do
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
  local left = math.ceil(math.max(ttl, min_hold) / 1000) + 8400000
  for i = 1, mode == 's' and 2 or 1 do
    if redis.call('PTTL', KEYS[i]) < left - 600000 then redis.call('PEXPIRE', KEYS[i], left) end
  end
end
return token
