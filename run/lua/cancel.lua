-- cancel: a queued run ends at once; a leased one is marked and its node told; an ended one stays as it is.
-- KEYS: those of closing()
-- ARGV: 1 events channel, 2 work channel, 3 cancel channel, 4 run id, 5 org the run must belong to, 6 now,
--       7 retention (ms), 8 default concurrency, 9 ended data, 10 outcome
-- Returns {'OK', state, '1' if this call ended the run} | {'NOTFOUND'} | {'CORRUPT'}
-- Safe to repeat: by the state.
local k = closing(KEYS)
local id, now = ARGV[4], tonumber(ARGV[6])
local r = load(k.run)
if not r or r.org ~= ARGV[5] then return {'NOTFOUND'} end
local ended = ''
if r.state == 'queued' then
  local c = {events = ARGV[1], work = ARGV[2], ttl = ARGV[7], limit = tonumber(ARGV[8])}
  local broken = finish(k, c, id, r, {state = 'cancelled', at = now, now = now, sum = 0, stored = ARGV[9], live = '', outcome = ARGV[10]})
  if broken then return {broken} end
  ended = '1'
elseif not terminal[r.state] then
  redis.call('HSET', k.run, 'cancel', '1')
  redis.call('PUBLISH', ARGV[3], id)
end
return {'OK', r.state, ended}
