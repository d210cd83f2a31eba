-- settle: starting or running -> a terminal state, with its two closing events and the money.
-- KEYS: those of closing()
-- ARGV: 1 events channel, 2 work channel, 3 run id, 4 token, 5 state, 6 at, 7 now, 8 sum of the stages, 9 ended data as
--       stored, 10 as published ('': the same), 11 outcome for the record, 12 retention (ms), 13 default concurrency,
--       then for output, stdout and stderr: how ('none', 'here' or 'put') and the bytes, or how many were put
-- Returns {'OK', record} | {'AGAIN', record} (settled before) | {'LEASE'} | {'SHORT'} (a stream that was put is not
--         whole: put it again) | {'STATE', state} (it cannot end like that from there) | {'CORRUPT'}
-- Safe to repeat: only the first acts.
local k = closing(KEYS)
local id = ARGV[3]
local r = load(k.run)
if not r or r.token ~= tonumber(ARGV[4]) then return {'LEASE'} end
if terminal[r.state] then return {'AGAIN', redis.call('HGETALL', k.run)} end
if not leased(r, r.token) then return {'LEASE'} end
local streams = {k.output, k.stdout, k.stderr}
for i, key in ipairs(streams) do
  if ARGV[12 + 2 * i] == 'put' and redis.call('STRLEN', key) ~= tonumber(ARGV[13 + 2 * i]) then return {'SHORT'} end
end
local c = {events = ARGV[1], work = ARGV[2], ttl = ARGV[12], limit = tonumber(ARGV[13])}
local broken = finish(k, c, id, r, {state = ARGV[5], at = tonumber(ARGV[6]), now = tonumber(ARGV[7]),
  sum = tonumber(ARGV[8]), stored = ARGV[9], live = ARGV[10], outcome = ARGV[11]})
if broken then return {broken, r.state} end
for i, key in ipairs(streams) do
  if ARGV[12 + 2 * i] == 'here' then redis.call('SET', key, ARGV[13 + 2 * i], 'PX', ARGV[12]) end
end
return {'OK', redis.call('HGETALL', k.run)}
