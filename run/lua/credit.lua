-- credit: a deposit, or a correction when negative, as a ledger entry.
-- KEYS: 1 org, 2 ledger, 3 entries    ARGV: 1 amount, 2 reference, 3 now, 4 largest balance
-- Returns {'OK'} | {'NOTFOUND'} | {'CONFLICT'} (reference used for another amount) | {'FUNDS'} | {'RANGE'}
-- Safe to repeat: by the reference.
local amount = tonumber(ARGV[1])
local o = redis.call('HMGET', KEYS[1], 'balance', 'held', 'deposits', 'entries')
if not o[1] then return {'NOTFOUND'} end
local entry = 'd:' .. ARGV[2]
local seen = redis.call('HGET', KEYS[2], entry)
if seen then
  if tonumber(string.match(seen, '^%d+ %d+ (%-?%d+)')) == amount then return {'OK'} end
  return {'CONFLICT'}
end
local balance, deposits, entries = num(o[1]) + amount, num(o[3]) + amount, num(o[4]) + 1
if balance < num(o[2]) then return {'FUNDS'} end
if balance > tonumber(ARGV[4]) or deposits > tonumber(ARGV[4]) then return {'RANGE'} end
redis.call('HSET', KEYS[1], 'balance', int(balance), 'deposits', int(deposits), 'entries', int(entries))
enter(KEYS[2], KEYS[3], entry, entries, ARGV[3] .. ' ' .. int(amount), balance)
return {'OK'}
