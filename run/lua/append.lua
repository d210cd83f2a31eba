-- append: adds events to a run's timeline, all or none, except those that it has already.
-- KEYS: 1 run, 2 events, 3 names (of the events appended so far)
-- ARGV: 1 events channel, 2 run id, 3 token, 4 most events a run may have, then for each event: name, type,
--       at, data as stored, data as published ('': the same)
-- Returns {'OK'} | {'LEASE'} | {'FULL'}
-- Safe to repeat, also as a part of more: by the events' names.
local r = load(KEYS[1])
if not leased(r, tonumber(ARGV[3])) then return {'LEASE'} end
if r.seq + (#ARGV - 4) / 5 > tonumber(ARGV[4]) then return {'FULL'} end
for i = 5, #ARGV, 5 do
  if redis.call('SADD', KEYS[3], ARGV[i]) == 1 then
    -- Under zero data retention the channel alone carries content, and publishing is no write: it is in no file.
    emit(KEYS[2], ARGV[1], ARGV[2], r, ARGV[i + 1], tonumber(ARGV[i + 2]), ARGV[i + 3], ARGV[i + 4])
  end
end
redis.call('HSET', KEYS[1], 'at_us', int(r.at), 'seq', int(r.seq))
return {'OK'}
