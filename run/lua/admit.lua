-- admit: idempotency, account check, hold, record, queue and first event, or nothing at all.
-- KEYS: 1 idempotency, 2 run, 3 events, 4 spec, 5 org, 6 queue, 7 active, 8 runs (index), 9 ring, 10 limits of the API key,
--       11 parked, 12 parked of the key, 13 leases
-- ARGV: 1 events channel, 2 work channel, 3 run id, 4 org id, 5 now, 6 fingerprint ('': no idempotency key),
--       7 lifetime of the idempotency key (ms), 8 amount to reserve, 9 price of the first compute slice,
--       10 request as the record keeps it, 11 whole spec ('': the request is whole), 12 '1' zero data retention,
--       13 API key id, 14 default queue limit (0: none), 15 default concurrency, 16 prefix and 17 suffix of a run's key,
--       18 how long the request wants its content kept after the end (ms; 0: as long as the rest), 19 image; of a run with
--       uploads also 20 how many bytes they may have together, and from 21 on the id of each
-- Returns {'OK'} | {'WAITS', run id, when it was queued, place, wait} | {'REPLAY', run id, readrun(), place, wait} | {'CONFLICT'} | {'NOTFOUND'} (no such org) | {'BUDGET'} | {'FUNDS'} |
--         {'IMAGE'} |
--         {'UPLOAD', which of them} (it is not there) | {'RETAINED', which of them} (it is on disk, which zero data retention forbids) | {'SIZE', bytes of all} |
--         {'FULL', when the request will be let in (microseconds from now; -1: not known)}
-- OK has two more values: the run's place in line (0: not known) and the microseconds until its turn (-1: not known). So has
-- REPLAY, with 0 when the run does not wait any more. WAITS is the replay of a run that waits and whose record has this very
-- request: nothing else is known of it.
-- Safe to repeat: by the idempotency key, and by the run id, which the caller makes once.
local idem, run, events, spec, org, queue, active, runs, ring, limits, parked, keyparked, leases = unpack(KEYS)
local k = {leases = leases, active = active, org = org, queue = queue, ring = ring, parked = parked}
local id, now, amount = ARGV[3], tonumber(ARGV[5]), tonumber(ARGV[8])
if ARGV[6] ~= '' then
  local seen = redis.call('GET', idem)
  if seen then
    local gap = string.find(seen, ' ', 1, true)
    if string.sub(seen, 1, gap - 1) ~= ARGV[6] then return {'CONFLICT'} end
    local first = string.sub(seen, gap + 1)
    if first == id then return {'OK', '0', '-1'} end
    local record, place, wait = ARGV[16] .. first .. ARGV[17], 0, -1
    local v = redis.call('HMGET', record, 'state', 'queued_us', 'request')
    if v[1] == 'queued' then
      place, wait = standing(k, first, ARGV[4], tonumber(ARGV[15]), now)
      if v[3] == ARGV[10] then return {'WAITS', first, v[2], place, wait} end
    end
    return {'REPLAY', first, readrun(record), place, wait}
  end
elseif redis.call('EXISTS', run) == 1 then
  return {'OK', '0', '-1'}
end
local o = redis.call('HMGET', org, 'balance', 'held', 'queue_limit', 'concurrency', 'images')
if not o[1] then return {'NOTFOUND'} end
if o[5] and o[5] ~= '' and not string.find(',' .. o[5] .. ',', ',' .. ARGV[19] .. ',', 1, true) then return {'IMAGE'} end
if ARGV[20] then
  local sum = 0
  for i = 21, #ARGV do
    local upload, content = uploadkeys(run, ARGV[i])
    local v = redis.call('HMGET', upload, 'org', 'state', 'size', 'expires_us', 'zdr')
    if v[1] ~= ARGV[4] or v[2] ~= 'whole' or tonumber(v[4]) <= now or redis.call('STRLEN', content) ~= tonumber(v[3]) then
      return {'UPLOAD', i - 20}
    end
    if ARGV[12] == '1' and v[5] ~= '1' then return {'RETAINED', i - 20} end
    sum = sum + tonumber(v[3])
  end
  if sum > tonumber(ARGV[20]) then return {'SIZE', int(sum)} end
end
if amount < tonumber(ARGV[9]) then return {'BUDGET'} end
local held = num(o[2])
if num(o[1]) - held < amount then return {'FUNDS'} end
local own = num(o[3])
local limit = own > 0 and own or tonumber(ARGV[14])
local together = num(o[4]) > 0 and num(o[4]) or tonumber(ARGV[15])

-- full refuses. Each one that is refused is told the time of a place of its own: told the same, all but the first would come
-- in vain. Whoever comes too early and often moves nobody further back than behind all that wait.
local function full(waiting)
  local promised = queue .. ':refused'
  redis.call('ZREMRANGEBYSCORE', promised, '-inf', int(now))
  local n = math.min(redis.call('ZCARD', promised) + 1, waiting)
  local wait = awaited(k, ARGV[4], n, together, now)
  if wait >= 0 then
    redis.call('ZADD', promised, int(now + wait), id)
    redis.call('ZREMRANGEBYRANK', promised, 0, -waiting - 1)
    redis.call('PEXPIRE', promised, ARGV[7])
  end
  return {'FULL', int(wait)}
end

local waiting = redis.call('ZCARD', queue) + redis.call('ZCARD', parked)
if limit > 0 and waiting >= limit then return full(waiting) end
local l = redis.call('HMGET', limits, 'concurrency', 'queue', 'slots', 'waiting')
local atonce, most = num(l[1]), num(l[2])
if most > 0 and num(l[4]) >= most then return full(num(l[4])) end

if ARGV[6] ~= '' then redis.call('SET', idem, ARGV[6] .. ' ' .. id, 'PX', ARGV[7]) end
redis.call('HSET', org, 'held', int(held + amount))
local r = {queued = now, at = now, seq = 0}
local place = waiting + 1
local wait = awaited(k, ARGV[4], place, together, now)
local data = '{"reserved_micros":' .. int(amount) .. ',"position":' .. int(place)
if wait >= 0 then data = data .. ',"estimated_wait_ms":' .. string.format('%.0f', wait / 1000) end
emit(events, ARGV[1], id, r, 'queued', now, data .. '}', '')
redis.call('HSET', run, 'state', 'queued', 'org', ARGV[4], 'key', ARGV[13], 'token', '0', 'queued_us', int(now),
  'at_us', int(r.at), 'seq', int(r.seq), 'reserved', int(amount), 'charged', '0', 'pending', '0', 'model', '0',
  'web', '0', 'compute', '0', 'zdr', ARGV[12], 'request', ARGV[10], 'wants', ARGV[19])
if ARGV[18] ~= '0' then redis.call('HSET', run, 'retention_ms', ARGV[18]) end
if ARGV[20] then
  redis.call('HSET', run, 'uploads', table.concat(ARGV, " ", 21))
  for i = 21, #ARGV do
    local upload, content, holders = uploadkeys(run, ARGV[i])
    redis.call('SADD', holders, id)
    redis.call('PERSIST', upload)
    redis.call('PERSIST', content)
    redis.call('ZREM', string.match(run, '^{[^}]*}:') .. 'uploads', ARGV[i])
    book(run, ARGV[4], ARGV[i], num(redis.call('HGET', upload, 'size')))
  end
end
if ARGV[11] ~= '' then
  redis.call('HSET', run, 'split', '1')
  if ARGV[12] == '1' then
    hide(run, spec, ARGV[11])
  else
    redis.call('SET', spec, ARGV[11])
  end
end
-- Records expire by themselves; their entries in the index are removed here, two for each one that is added.
for _, old in ipairs(redis.call('ZRANGE', runs, 0, 1)) do
  if redis.call('EXISTS', ARGV[16] .. old .. ARGV[17]) == 0 then redis.call('ZREM', runs, old) end
end
redis.call('ZADD', runs, 0, id)
local counted = atonce > 0 or most > 0
if counted then
  redis.call('HSET', run, 'counted', '1')
  redis.call('HINCRBY', limits, 'waiting', 1)
end
if counted and atonce > 0 and num(l[3]) >= atonce then
  redis.call('ZADD', keyparked, int(now), id)
  redis.call('ZADD', parked, int(now), id)
else
  if counted then redis.call('HINCRBY', limits, 'slots', 1) end
  redis.call('ZADD', queue, int(now), id)
end
relist(queue, active, org, ring, ARGV[4], tonumber(ARGV[15]), ARGV[2])
return {'OK', place, wait}
