-- take: leases the oldest run of the organisation that was served longest ago.
-- KEYS: 1 ring, 2 turn, 3 leases, 4 answer (remembers what this call took)
-- ARGV: 1 events channel, 2 work channel, 3 node, 4 now, 5 end of the lease, 6 lifetime of the answer (ms),
--       7 default concurrency, 8 retention (ms), 9 ended data and 10 outcome of a run whose content is gone,
--       11 the images that the node has machines of now, each between spaces ('': any), from 12 on the keys of a run, with <run> and <org> in them, in the order of closing()
-- Returns {'OK', run id, org, token, queued_us, reserved, request, spec ('': the request is whole), ended} | {'NONE', ended} |
--         {'CORRUPT', run id}; ended: organisation and id of each run that this call ended, with spaces between them
-- Safe to repeat with the same answer key: it gives the same lease again, for its full time.
local ring, turns, leases, answer = unpack(KEYS)
local now, limit = tonumber(ARGV[4]), tonumber(ARGV[7])
local c = {events = ARGV[1], work = ARGV[2], limit = limit, ttl = ARGV[8]}

local function names(org, id)
  local k = {}
  for i = 12, #ARGV do k[#k + 1] = (ARGV[i]:gsub('<run>', id):gsub('<org>', org)) end
  return closing(k)
end

local ended = ''

-- lost ends a run that nobody can execute any more.
local function lost(k, id, r)
  local broken = finish(k, c, id, r, {state = 'failed', at = now, now = now, sum = 0, stored = ARGV[9], live = '', outcome = ARGV[10]})
  if not broken then ended = ended .. r.org .. ' ' .. id .. ' ' end
  return broken
end

-- lease is the answer for a run that may be executed; nil when its content is gone.
local function lease(k, id, r)
  local v = redis.call('HMGET', k.run, 'request', 'split')
  local spec = ''
  if v[2] then spec = redis.call('GET', k.spec) end
  if not spec then return nil end
  return {'OK', id, r.org, int(r.token), int(r.queued), int(r.reserved), v[1], spec}
end

local before = redis.call('GET', answer)
if before then
  local org, id, token = string.match(before, '^(%S+) (%S+) (%d+)$')
  local k = names(org, id)
  local r = load(k.run)
  if r and r.state == 'starting' and r.token == tonumber(token) then
    local answered = lease(k, id, r)
    if answered then
      redis.call('HSET', k.run, 'lease_us', ARGV[5])
      redis.call('ZADD', leases, ARGV[5], id)
      answered[9] = ended
      return answered
    end
    local broken = lost(k, id, r)
    if broken then return {broken, id} end
  end
  redis.call('DEL', answer)
end

-- fits tells whether the node has machines for a run. Of one that is gone, or was admitted before images were noted, that is
-- found out later.
local function fits(k, id)
  if ARGV[11] == '' then return true end
  local wants = redis.call('HGET', (k.run:gsub('<run>', id)), 'wants')
  return not wants or ARGV[11]:find(' ' .. wants .. ' ', 1, true) ~= nil
end

-- fitting is the oldest of an organisation's runs that the node has machines for; nil: there is none among the first hundred.
local function fitting(k, first)
  if fits(k, first) then return first end
  for _, id in ipairs(redis.call('ZRANGE', k.queue, 1, 99)) do
    if fits(k, id) then return id end
  end
end

local passed = 0 -- organisations, whose runs other nodes may have machines for
for _ = 1, 100 do
  local org = redis.call('ZRANGE', ring, passed, passed)[1]
  if not org then return {'NONE', ended} end
  local k = names(org, '<run>')
  local own = num(redis.call('HGET', k.org, 'concurrency'))
  local id = redis.call('ZRANGE', k.queue, 0, 0)[1]
  if not id or redis.call('SCARD', k.active) >= (own > 0 and own or limit) then
    redis.call('ZREM', ring, org)
    id = nil
  else
    id = fitting(k, id)
    if not id then passed = passed + 1 end
  end
  if id then
    k = names(org, id)
    local r = load(k.run)
    if not r or not legal[r.state].starting then
      redis.call('ZREM', k.queue, id)
    else
      local turn = redis.call('INCR', turns)
      redis.call('HSET', k.org, 'turn', int(turn))
      local answered = lease(k, id, r)
      if not answered then
        local broken = lost(k, id, r)
        if broken then return {broken, id} end
      else
        r.token = r.token + 1
        answered[4] = int(r.token)
        answered[9] = ended
        redis.call('HSET', k.run, 'state', 'starting', 'token', int(r.token), 'node', ARGV[3], 'taken_us', int(now),
          'lease_us', ARGV[5])
        redis.call('ZREM', k.queue, id)
        redis.call('SADD', k.active, id)
        redis.call('ZADD', leases, ARGV[5], id)
        occupy(k, id, now)
        redis.call('SET', answer, org .. ' ' .. id .. ' ' .. int(r.token), 'PX', ARGV[6])
        if r.counted then redis.call('HINCRBY', (keyed(k, r)), 'waiting', -1) end
        if r.zdr then unhide(k.run, k.spec, k.stain) end
        relist(k.queue, k.active, k.org, ring, org, limit, c.work)
        return answered
      end
    end
  end
end
return {'NONE', ended}
