-- connection: puts a connection of an organisation, or deletes it.
-- KEYS: 1 org, 2 connections    ARGV: 1 name, 2 connection as JSON ('' deletes), 3 most connections,
--   4 what is there now as the caller read it ('*' for whatever, '' for nothing)
-- Returns {'OK'} | {'NOTFOUND'} (no such organisation, or nothing to delete) | {'RANGE'} (too many) | {'CHANGED'} (changed since)
-- Safe to repeat: the same connection again is the same connection.
if redis.call('EXISTS', KEYS[1]) == 0 then return {'NOTFOUND'} end
local old = redis.call('HGET', KEYS[2], ARGV[1])
if old == ARGV[2] then return {'OK'} end
if ARGV[4] ~= '*' and (old or '') ~= ARGV[4] then return {'CHANGED'} end
if ARGV[2] == '' then
  if redis.call('HDEL', KEYS[2], ARGV[1]) == 0 then return {'NOTFOUND'} end
  return {'OK'}
end
if not old and redis.call('HLEN', KEYS[2]) >= tonumber(ARGV[3]) then return {'RANGE'} end
redis.call('HSET', KEYS[2], ARGV[1], ARGV[2])
return {'OK'}
