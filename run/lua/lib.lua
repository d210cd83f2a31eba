-- What the scripts share; it is put in front of each of them, after what states.go makes: terminal[state], legal[from][to], and
-- readshown(run), the values of those fields of a record that are shown before the end. Times are whole microseconds of the caller's clock,
-- money is whole micro-dollars, both below 2^53, so that Lua's numbers hold them exactly.

-- int writes a whole number; tostring would turn large ones into 1e+15.
local function int(n) return string.format('%.0f', n) end

-- num reads a stored whole number; a missing one is 0.
local function num(s) return tonumber(s or 0) or 0 end

-- closing names the keys of one run and its organisation, in the order in which the scripts get them.
local function closing(k)
  return {run = k[1], events = k[2], calls = k[3], spec = k[4], output = k[5], stdout = k[6], stderr = k[7],
    org = k[8], queue = k[9], active = k[10], ledger = k[11], leases = k[12], ring = k[13], names = k[14],
    stain = k[15], entries = k[16], parked = k[17], limits = k[18], keyparked = k[19],
    left = k[20], content = k[21], due = k[22], usage = k[23]}
end

-- load reads the fields of a run's record that transitions decide on; nil when there is no such run.
local function load(run)
  local v = redis.call('HMGET', run, 'state', 'org', 'token', 'queued_us', 'at_us', 'seq', 'reserved', 'charged',
    'pending', 'model', 'web', 'compute', 'zdr', 'cancel', 'node', 'key', 'counted', 'warned')
  if not v[1] then return nil end
  return {state = v[1], org = v[2], token = num(v[3]), queued = num(v[4]), at = num(v[5]), seq = num(v[6]),
    reserved = num(v[7]), charged = num(v[8]), pending = num(v[9]), model = num(v[10]), web = num(v[11]),
    compute = num(v[12]), zdr = v[13] == '1', cancel = v[14] == '1', node = v[15] or '', key = v[16] or '',
    counted = v[17] == '1', warned = v[18] == '1'}
end

-- readrun reads a run's record for record() in record.go: of a run that has not ended what readshown gives, else names and
-- values of all fields; nothing when there is none.
local function readrun(run)
  local v = readshown(run)
  if v[1] and not terminal[v[1]] then return v end
  return redis.call('HGETALL', run)
end

-- leased tells whether the run belongs to the holder of this token now.
local function leased(r, token)
  return r ~= nil and r.token == token and (r.state == 'starting' or r.state == 'running')
end

-- emit appends an event: stored in the run's list, live to the subscribers ('' when both are the same). The time never
-- goes back. The caller saves r.at and r.seq with the rest of the record.
local function emit(events, channel, id, r, type, at, stored, live)
  if at > r.at then r.at = at end
  r.seq = r.seq + 1
  local us = r.at - r.queued
  local head = '{"seq":' .. int(r.seq) .. ',"run":"' .. id .. '","type":"' .. type .. '","at_ms":'
    .. string.format('%.0f.%03d', math.floor(us / 1000), us % 1000)
  local function event(data)
    if data == '' then return head .. '}' end
    return head .. ',"data":' .. data .. '}'
  end
  local kept = event(stored)
  redis.call('RPUSH', events, kept)
  redis.call('PUBLISH', channel, live == '' and kept or event(live))
end

-- relist puts the organisation into the ring of those that take serves, or out of it: in when it has runs waiting and
-- is under its limit. Its place is the turn at which it was last served. Nodes that wait are woken.
local function relist(queue, active, orgkey, ring, org, limit, work)
  local o = redis.call('HMGET', orgkey, 'concurrency', 'turn')
  local own = num(o[1])
  if own > 0 then limit = own end
  if redis.call('ZCARD', queue) > 0 and redis.call('SCARD', active) < limit then
    redis.call('ZADD', ring, int(num(o[2])), org)
    redis.call('PUBLISH', work, org)
  else
    redis.call('ZREM', ring, org)
  end
end

-- Limits of an API key. Of a key with a limit on runs at once only as many runs are in the queue or leased: each of them has
-- one of the key's slots. The others are parked, so that a take meets only runs that may start. Runs admitted while their
-- key has a limit are counted: slots and waiting (in the queue or parked).

-- keyed names the keys of the run's API key.
local function keyed(k, r)
  return (string.gsub(k.limits, '<key>', r.key)), (string.gsub(k.keyparked, '<key>', r.key))
end

-- promote moves the oldest parked runs of a key into the queue, as many as it has slots for.
local function promote(limits, keyparked, parked, queue)
  local l = redis.call('HMGET', limits, 'concurrency', 'slots')
  local most, slots = num(l[1]), num(l[2])
  while most == 0 or slots < most do
    local first = redis.call('ZRANGE', keyparked, 0, 0, 'WITHSCORES')
    if not first[1] then break end
    redis.call('ZREM', keyparked, first[1])
    redis.call('ZREM', parked, first[1])
    redis.call('ZADD', queue, first[2], first[1])
    slots = slots + 1
    redis.call('HSET', limits, 'slots', int(slots))
  end
end

-- uncount takes a run that ends out of its key's counts and lets the next one in.
local function uncount(k, id, r, waited)
  if not r.counted then return end
  local limits, keyparked = keyed(k, r)
  if waited then redis.call('HINCRBY', limits, 'waiting', -1) end
  if waited and redis.call('ZREM', keyparked, id) == 1 then
    redis.call('ZREM', k.parked, id)
  else
    redis.call('HINCRBY', limits, 'slots', -1)
    promote(limits, keyparked, k.parked, k.queue)
  end
end

-- void gives back what the run's unfinished calls had reserved.
local function void(calls, r)
  if r.pending == 0 then return end
  local all = redis.call('HGETALL', calls)
  for i = 1, #all, 2 do
    if string.sub(all[i + 1], 1, 2) == 'p ' then
      redis.call('HSET', calls, all[i], 'v ' .. string.sub(all[i + 1], 3))
    end
  end
  r.pending = 0
end

-- snapshots counts the snapshots that Redis has made of its memory, and tells whether one is being made now.
local function snapshots()
  local info = redis.pcall('INFO', 'persistence')
  if type(info) ~= 'string' then return 0, true end
  local count = num(string.match(info, 'aof_rewrites:(%d+)')) + num(string.match(info, 'rdb_saves:(%d+)'))
  return count, string.match(info, '_in_progress:1') ~= nil
end

-- hide keeps content under zero data retention: in memory, neither in the append-only file nor on a replica.
local function hide(run, spec, content)
  redis.call('HSET', run, 'snapshots', int((snapshots())))
  redis.set_repl(redis.REPL_NONE)
  redis.call('SET', spec, content)
  redis.set_repl(redis.REPL_ALL)
end

-- unhide removes it. When Redis has made a snapshot meanwhile, that holds the content: the stain says that another must
-- replace it.
local function unhide(run, spec, stain)
  if redis.call('DEL', spec) == 0 then return end
  local count, busy = snapshots()
  if busy or count ~= num(redis.call('HGET', run, 'snapshots')) then redis.call('SET', stain, '1') end
end

-- Uploads are files that clients sent ahead of the runs that use them. A run holds its uploads until it has them or has ended;
-- what no run holds goes when its time is over. The names derive from any key of the cell; see keys.go.

-- uploadkeys names the keys of an upload.
local function uploadkeys(any, id)
  local upload = string.match(any, '^{[^}]*}:') .. 'upload:' .. id
  return upload, upload .. ':content', upload .. ':holders'
end

-- bookkeys names what an organisation's uploads are counted in: those that it has, and their bytes.
local function bookkeys(any, org)
  local book = string.match(any, '^{[^}]*}:') .. 'org:' .. org .. ':uploads'
  return book, book .. ':bytes'
end

-- book counts an upload to its organisation until a time (microseconds; nil: as long as a run holds it).
local function book(any, org, id, size, till)
  local all, bytes = bookkeys(any, org)
  local score = till and int(math.floor(till / 1000)) or '+inf'
  if redis.call('ZADD', all, score, id .. ' ' .. int(size)) == 1 then redis.call('INCRBY', bytes, int(size)) end
end

-- unbook counts it no more.
local function unbook(any, org, id, size)
  local all, bytes = bookkeys(any, org)
  if redis.call('ZREM', all, id .. ' ' .. int(size)) == 1 then redis.call('DECRBY', bytes, int(size)) end
end

-- discard removes an upload; thoroughly: from the files of Redis as well, see scrub.go. What was hidden is in one only if Redis
-- has made a snapshot meanwhile.
local function discard(any, id, thoroughly)
  local upload, content, holders = uploadkeys(any, id)
  local cell = string.match(any, '^{[^}]*}:')
  local v = redis.call('HMGET', upload, 'org', 'size', 'zdr', 'snapshots')
  local had = redis.call('DEL', content) == 1
  redis.call('DEL', upload, holders)
  if v[1] then unbook(any, v[1], id, num(v[2])) end
  if v[3] == '1' then
    redis.call('ZREM', cell .. 'uploads', id)
    local count, busy = snapshots()
    thoroughly = busy or count ~= num(v[4])
  end
  if had and thoroughly then redis.call('SET', cell .. 'stain', '1') end
end

-- letgo ends a run's hold of an upload.
local function letgo(any, id, run, now)
  local upload, content, holders = uploadkeys(any, id)
  if redis.call('SREM', holders, run) == 0 or redis.call('SCARD', holders) > 0 then return end
  local v = redis.call('HMGET', upload, 'once', 'expires_us', 'org', 'size')
  local left = math.floor((num(v[2]) - now) / 1000)
  if v[1] == '1' or left <= 0 then return discard(any, id, v[1] == '1') end
  redis.call('PEXPIRE', upload, int(left))
  redis.call('PEXPIRE', content, int(left))
  book(any, v[3], id, num(v[4]), num(v[2]))
end

-- enter writes entry n of a ledger: under its name, for look-ups, and in its place with the balance after it, for statements.
local function enter(ledger, entries, name, n, line, balance)
  redis.call('HSET', ledger, name, int(n) .. ' ' .. line)
  redis.call('RPUSH', entries, name .. ' ' .. int(balance))
end

-- forgive takes back everything that a run was charged which never started: it costs nothing, and its next attempt may use
-- the same call ids.
local function forgive(k, r)
  redis.call('DEL', k.calls)
  r.charged, r.pending, r.model, r.web, r.compute = 0, 0, 0, 0, 0
  redis.call('HSET', k.run, 'charged', '0', 'pending', '0', 'model', '0', 'web', '0', 'compute', '0')
  redis.call('HDEL', k.run, 'warned')
end

-- Places: a leased run has one, in the cell and in its organisation. Since when, and how long runs keep theirs, is what the
-- wait of those behind is estimated from. The names are those of the leases, the set of active runs and the organisation
-- with a suffix; see keys.go.

-- occupy notes that a run has got its place.
local function occupy(k, id, now)
  redis.call('ZADD', k.leases .. ':since', int(now), id)
  redis.call('ZADD', k.active .. ':since', int(now), id)
end

-- learn adds a time, in milliseconds, to the mean and the mean square of how long places are kept. The last 20 count.
local function learn(key, ms)
  local v = redis.call('HMGET', key, 'n', 'mean', 'square')
  local n = math.min(num(v[1]) + 1, 1000)
  local w = math.max(1 / n, 0.05)
  redis.call('HSET', key, 'n', int(n), 'mean', string.format('%.6f', num(v[2]) + w * (ms - num(v[2]))),
    'square', string.format('%.6f', num(v[3]) + w * (ms * ms - num(v[3]))))
end

-- vacate notes that a run has left its place; used: it had it until its end, and so tells how long places are kept.
local function vacate(k, id, now, used)
  local since = redis.call('ZSCORE', k.leases .. ':since', id)
  if not since then return end
  redis.call('ZREM', k.leases .. ':since', id)
  redis.call('ZREM', k.active .. ':since', id)
  if used then
    local ms = math.max(0, now - tonumber(since)) / 1000
    learn(k.leases .. ':service', ms)
    learn(k.org .. ':service', ms)
  end
end

-- departure is after how many milliseconds the n-th place is given up, of which c are held, some since the times in the set;
-- v: mean and mean square of how long places are kept. What all keep equally long ends in order; what ends at random ends
-- evenly.
local function departure(n, c, since, v, now)
  local mean = num(v[1])
  local rounds, at = math.floor((n - 1) / c), (n - 1) % c
  local left = mean
  local held = redis.call('ZRANGE', since, at, at, 'WITHSCORES')
  if held[2] then left = math.max(0, mean - (now - tonumber(held[2])) / 1000) end
  local random = 1
  if mean > 0 then random = math.min(1, math.max(0, num(v[2]) / (mean * mean) - 1)) end
  return (1 - random) * (rounds * mean + left) + random * n * mean / c
end

-- capacity is how many runs all nodes together take at once, as far as they have said so; leased: how many they have.
local function capacity(k, leased, now)
  local sum = 0
  local all = redis.call('HGETALL', k.leases .. ':slots')
  for i = 2, #all, 2 do
    local slots, till = string.match(all[i], '^(%d+) (%d+)$')
    if slots and tonumber(till) > now then sum = sum + tonumber(slots) end
  end
  return math.max(sum, leased, 1)
end

-- ahead is how many runs of the cell are taken until the place-th of the organisation is: organisations take turns.
local function ahead(k, org, place)
  local others = redis.call('ZRANGE', k.ring, 0, 99)
  local n = place
  for _, other in ipairs(others) do
    if other ~= org then
      local queue = string.gsub(k.queue, ':org:' .. string.gsub(org, '%-', '%%-') .. ':', ':org:' .. other .. ':')
      n = n + math.min(place, redis.call('ZCARD', queue))
    end
  end
  return n
end

-- awaited is after how many whole microseconds the place-th of the organisation's waiting runs gets its turn; -1: not known.
-- k: leases, active, org (keys), queue, ring; limit: of the organisation's runs at once.
local function awaited(k, org, place, limit, now)
  local cell, own = 0, 0
  local leased = redis.call('ZCARD', k.leases)
  local c = capacity(k, leased, now)
  local first, second = ahead(k, org, place) - (c - leased), place - math.max(0, limit - redis.call('SCARD', k.active))
  if first <= 0 and second <= 0 then return 0 end
  local all = redis.call('HMGET', k.leases .. ':service', 'mean', 'square')
  if not all[1] then return -1 end
  if first > 0 then cell = departure(first, c, k.leases .. ':since', all, now) end
  if second > 0 then
    local mine = redis.call('HMGET', k.org .. ':service', 'mean', 'square')
    own = departure(second, limit, k.active .. ':since', mine[1] and mine or all, now)
  end
  return math.floor(math.max(cell, own) * 1000)
end

-- standing tells where a run waits (1: the next of its organisation; 0: it does not wait) and after how many microseconds it
-- gets its turn (-1: not known). k: as for awaited, and parked; default: of concurrency.
local function standing(k, id, org, default, now)
  local place = redis.call('ZRANK', k.queue, id)
  if not place then
    place = redis.call('ZRANK', k.parked, id)
    if not place then return 0, -1 end
    place = place + redis.call('ZCARD', k.queue)
  end
  local own = num(redis.call('HGET', k.org, 'concurrency'))
  return place + 1, awaited(k, org, place + 1, own > 0 and own or default, now)
end

-- tally adds an ended run to its organisation's usage of the day (UTC) on which it ended.
-- counts: runs, micro-dollars in all, of model, web and compute, then of the outcome model calls, input, output and all tokens, and shell commands.
local function tally(usage, at, counts)
  local day, i = int(math.floor(at / 86400000000)), 0
  for had in string.gmatch(redis.call('HGET', usage, day) or '', '%d+') do
    i = i + 1
    counts[i] = counts[i] + tonumber(had)
  end
  for j, n in ipairs(counts) do counts[j] = int(n) end
  redis.call('HSET', usage, day, table.concat(counts, ' '))
end

-- finish ends a run: closing events, hold settled, ledger entry, queue, lease and ring tidied, retention started.
-- f: state, at (of the state), now (of the settlement), sum (of the stages known, from queued_us on), stored and live
-- (data of the event named after the state), outcome (what the record keeps of how it ended).
-- c: events and work (channels), limit (default concurrency), ttl (retention in ms).
-- Returns an error code instead, with nothing done: 'STATE' when the run cannot get there from where it is, 'CORRUPT'
-- when the books do not fit the record.
local function finish(k, c, id, r, f)
  if not legal[r.state][f.state] then return 'STATE' end
  local m = redis.call('HMGET', k.org, 'balance', 'held', 'charged', 'entries', 'retention_ms')
  local balance, held, charged, entries = num(m[1]), num(m[2]), num(m[3]), num(m[4])
  if r.charged + r.pending > r.reserved or r.charged ~= r.model + r.web + r.compute
    or held < r.reserved or balance < r.charged then
    return 'CORRUPT'
  end
  local u = cjson.decode(f.outcome).usage
  local waited = r.state == 'queued'
  void(k.calls, r)
  local released = r.reserved - r.charged
  emit(k.events, c.events, id, r, f.state, f.at, f.stored, f.live)
  local done = math.max(f.now, r.queued + f.sum)
  emit(k.events, c.events, id, r, 'worker.destroyed', done, '{"reserved_micros":' .. int(r.reserved)
    .. ',"charged_micros":' .. int(r.charged) .. ',"released_micros":' .. int(released)
    .. ',"model_micros":' .. int(r.model) .. ',"web_micros":' .. int(r.web)
    .. ',"compute_micros":' .. int(r.compute) .. '}', '')
  redis.call('HSET', k.run, 'state', f.state, 'at_us', int(r.at), 'seq', int(r.seq), 'ended_us', int(r.at),
    'pending', '0', 'released', int(released), 'outcome', f.outcome)
  redis.call('HSET', k.org, 'balance', int(balance - r.charged), 'held', int(held - r.reserved),
    'charged', int(charged + r.charged))
  if r.charged > 0 then
    entries = entries + 1
    redis.call('HSET', k.org, 'entries', int(entries))
    enter(k.ledger, k.entries, 'c:' .. id, entries, int(r.at) .. ' ' .. int(r.charged) .. ' ' .. int(r.model) .. ' '
      .. int(r.web) .. ' ' .. int(r.compute), balance - r.charged)
  end
  tally(k.usage, r.at, {1, r.charged, r.model, r.web, r.compute, u.model_calls, u.input_tokens, u.output_tokens,
    u.total_tokens, u.shell_commands})
  if r.zdr then unhide(k.run, k.spec, k.stain) end
  redis.call('DEL', k.names)
  if waited then redis.call('ZREM', k.queue, id) else redis.call('SREM', k.active, id) end
  redis.call('ZREM', k.leases, id)
  vacate(k, id, f.now, true)
  uncount(k, id, r, waited)
  for _, key in ipairs({k.run, k.events, k.calls, k.spec, k.output, k.stdout, k.stderr, k.left, k.content}) do
    redis.call('PEXPIRE', key, c.ttl)
  end
  local more = redis.call('HMGET', k.run, 'retention_ms', 'uploads')
  for upload in string.gmatch(more[2] or '', '%S+') do letgo(k.run, upload, id, f.now) end
  local own, all = num(more[1]), num(m[5])
  local keep = own > 0 and all > 0 and math.min(own, all) or math.max(own, all)
  if keep > 0 and keep < tonumber(c.ttl) then
    redis.call('HSET', k.run, 'until_us', int(r.at + 1000 * keep))
    redis.call('ZADD', k.due, int(math.floor(r.at / 1000) + keep), id)
  end
  r.state = f.state
  relist(k.queue, k.active, k.org, k.ring, r.org, c.limit, c.work)
  return nil
end

-- requeue gives a run that never started back to the queue, at the place of its age. Returns 'STATE' instead, with nothing
-- done, when it has started.
local function requeue(k, c, id, r)
  if not legal[r.state].queued then return 'STATE' end
  forgive(k, r)
  redis.call('HSET', k.run, 'state', 'queued')
  redis.call('HDEL', k.run, 'node', 'taken_us', 'lease_us')
  redis.call('SREM', k.active, id)
  redis.call('ZREM', k.leases, id)
  vacate(k, id, 0, false)
  redis.call('ZADD', k.queue, int(r.queued), id)
  if r.counted then redis.call('HINCRBY', (keyed(k, r)), 'waiting', 1) end
  relist(k.queue, k.active, k.org, k.ring, r.org, c.limit, c.work)
  return nil
end

