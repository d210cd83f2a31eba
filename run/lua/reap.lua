-- reap: what becomes of a run whose node is gone. Never started: back to the queue, or cancelled when that was asked.
-- Started: failed, settled with what was captured. Without its content, or lost too often: failed, costing nothing.
-- KEYS: those of closing()
-- ARGV: 1 events channel, 2 work channel, 3 run id, 4 token the run was seen with, 5 now, 6 node known to be dead ('':
--       only an expired lease counts), 7 most times a run may be lost, 8 retention (ms), 9 default concurrency,
--       10 ended data and 11 outcome of a lost run, 12 ended data and 13 outcome of a cancelled one
-- Returns {'REQUEUED'} | {'LOST'} | {'CANCELLED'} | {'SKIP'} (renewed, settled or taken again meanwhile) | {'CORRUPT'}
-- Safe to repeat: by the token, which a lost run changes so that its old node cannot write.
local k = closing(KEYS)
local id, now = ARGV[3], tonumber(ARGV[5])
local r = load(k.run)
if not r then
  redis.call('ZREM', k.leases, id)
  redis.call('SREM', k.active, id)
  vacate(k, id, now, false)
  return {'SKIP'}
end
if not leased(r, tonumber(ARGV[4])) then return {'SKIP'} end
local expired = num(redis.call('HGET', k.run, 'lease_us')) < now
if not expired and (ARGV[6] == '' or r.node ~= ARGV[6]) then return {'SKIP'} end
local c = {events = ARGV[1], work = ARGV[2], ttl = ARGV[8], limit = tonumber(ARGV[9])}
local function close(state, stored, outcome)
  return finish(k, c, id, r, {state = state, at = now, now = now, sum = 0, stored = stored, live = '', outcome = outcome})
end
local v = redis.call('HMGET', k.run, 'lost', 'split')
local lost = num(v[1]) + 1
local gone = v[2] and redis.call('EXISTS', k.spec) == 0
if r.state == 'starting' then forgive(k, r) end
if r.state == 'starting' and r.cancel then
  local broken = close('cancelled', ARGV[12], ARGV[13])
  return {broken or 'CANCELLED'}
end
if r.state == 'starting' and not gone and lost < tonumber(ARGV[7]) then
  redis.call('HSET', k.run, 'token', int(r.token + 1), 'lost', int(lost))
  requeue(k, c, id, r)
  return {'REQUEUED'}
end
local broken = close('failed', ARGV[10], ARGV[11])
if broken then return {broken} end
redis.call('HSET', k.run, 'token', int(r.token + 1))
return {'LOST'}
