-- signup: an organisation that somebody makes by themselves, with trial credit from a pot and a first key.
-- KEYS: 1 pot, 2 rate of the address (microseconds: the theoretical arrival time of its next sign-up), 3 org, 4 orgs (index),
--       5 turn, 6 ledger, 7 entries, 8 secret, 9 key, 10 keys of the org (index), 11 idempotency key
-- ARGV: 1 org id, 2 name, 3 concurrency, 4 now, 5 credit, 6 size of the pot, 7 key id, 8 SHA-256, 9 name of the key,
--       10 reference of the credit, 11 microseconds between two sign-ups of an address, 12 by which they may run ahead of it,
--       13 fingerprint of the request (empty: it has no idempotency key), 14 how long it is remembered (ms)
-- Returns {'OK'} | {'EXISTS'} (another organisation has the id) | {'SIGNEDUP'} (the key has made an account) |
--         {'CONFLICT'} (of another request) | {'LIMITED', microseconds to wait} | {'EXHAUSTED'}
-- Safe to repeat: the ids and the secret are made once by the caller; the same again gives nothing more from the pot.
-- The pot counts what was ever given. The time of the rate is Redis's own, as in authenticate.lua.
if redis.call('EXISTS', KEYS[3]) == 1 then
  if redis.call('HGET', KEYS[8], 'id') == ARGV[7] then return {'OK'} end
  return {'EXISTS'}
end
local before = ARGV[13] ~= '' and redis.call('GET', KEYS[11])
if before then return {before == ARGV[13] and 'SIGNEDUP' or 'CONFLICT'} end
local credit, interval, most = tonumber(ARGV[5]), tonumber(ARGV[11]), tonumber(ARGV[12])
local t = redis.call('TIME')
local now = tonumber(t[1]) * 1000000 + tonumber(t[2])
local next = math.max(num(redis.call('GET', KEYS[2])), now) + interval
if next - now > most then return {'LIMITED', int(next - now - most)} end
local given = num(redis.call('HGET', KEYS[1], 'given')) + credit
if given > tonumber(ARGV[6]) then return {'EXHAUSTED'} end
if ARGV[13] ~= '' then redis.call('SET', KEYS[11], ARGV[13], 'PX', ARGV[14]) end
redis.call('SET', KEYS[2], int(next), 'PX', int(math.ceil((next - now) / 1000)))
redis.call('HSET', KEYS[1], 'given', int(given))
redis.call('HINCRBY', KEYS[1], 'count', 1)
redis.call('HSET', KEYS[3], 'name', ARGV[2], 'concurrency', ARGV[3], 'first_concurrency', ARGV[3], 'created_us', ARGV[4], 'balance', int(credit),
  'held', '0', 'deposits', int(credit), 'charged', '0', 'entries', '1', 'turn', int(redis.call('INCR', KEYS[5])))
redis.call('ZADD', KEYS[4], ARGV[4], ARGV[1])
enter(KEYS[6], KEYS[7], 'd:' .. ARGV[10], 1, ARGV[4] .. ' ' .. int(credit), credit)
redis.call('HSET', KEYS[8], 'id', ARGV[7], 'org', ARGV[1], 'name', ARGV[9], 'role', 'member', 'created_us', ARGV[4])
redis.call('SET', KEYS[9], ARGV[8])
redis.call('ZADD', KEYS[10], ARGV[4], ARGV[7])
return {'OK'}
