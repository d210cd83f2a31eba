-- requeue: starting -> queued, by the node that leased the run; a run that was asked to cancel ends instead.
-- KEYS: those of closing()
-- ARGV: 1 events channel, 2 work channel, 3 run id, 4 token, 5 now, 6 content to keep again until the next take
--       ('': none), 7 retention (ms), 8 default concurrency, 9 ended data and 10 outcome of a cancelled run
-- Returns {'OK', '1' if this call ended the run} | {'LEASE'} | {'STATE', state} (it has started) | {'CORRUPT'}
-- Safe to repeat: by state and token.
local k = closing(KEYS)
local id, now = ARGV[3], tonumber(ARGV[5])
local r = load(k.run)
if not r or r.token ~= tonumber(ARGV[4]) then return {'LEASE'} end
if r.state == 'queued' then return {'OK', ''} end
if not leased(r, r.token) then return {'LEASE'} end
if not legal[r.state].queued then return {'STATE', r.state} end
local c = {events = ARGV[1], work = ARGV[2], ttl = ARGV[7], limit = tonumber(ARGV[8])}
if r.cancel then
  forgive(k, r)
  local broken = finish(k, c, id, r, {state = 'cancelled', at = now, now = now, sum = 0, stored = ARGV[9], live = '', outcome = ARGV[10]})
  if broken then return {broken} end
  return {'OK', '1'}
end
if ARGV[6] ~= '' then hide(k.run, k.spec, ARGV[6]) end
requeue(k, c, id, r)
return {'OK', ''}
