-- append: adds events to a run's timeline, all or none.
-- KEYS: 1 run, 2 events
-- ARGV: 1 events channel, 2 run id, 3 token, 4 name of the batch, 5 most events a run may have, then for each event:
--       type, at, data as stored, data as published ('': the same)
-- Returns {'OK'} | {'LEASE'} | {'FULL'}
-- Safe to repeat: the record remembers the names of the last 32 batches. A name has 16 characters.
local r = load(KEYS[1])
if not leased(r, tonumber(ARGV[3])) then return {'LEASE'} end
local recent = redis.call('HGET', KEYS[1], 'batches') or ''
if string.find(recent, ARGV[4], 1, true) then return {'OK'} end
if r.seq + (#ARGV - 5) / 4 > tonumber(ARGV[5]) then return {'FULL'} end
for i = 6, #ARGV, 4 do
  local live = ARGV[i + 3]
  -- Under zero data retention the channel alone carries content, and publishing is no write: it is in no file.
  emit(KEYS[2], ARGV[1], ARGV[2], r, ARGV[i], tonumber(ARGV[i + 1]), ARGV[i + 2], live)
end
redis.call('HSET', KEYS[1], 'at_us', int(r.at), 'seq', int(r.seq), 'batches', string.sub(recent .. ' ' .. ARGV[4], -17 * 32))
return {'OK'}
