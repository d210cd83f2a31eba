-- share: lets whoever has a secret read one run until a time.
-- KEYS: 1 run, 2 shares of the run, 3 share
-- ARGV: 1 run id, 2 org the run must belong to, 3 share id, 4 SHA-256 of the secret, 5 now, 6 expiry (microseconds), 7 most
-- Returns {'OK'} | {'NOTFOUND'} | {'STATE', state} (zero data retention) | {'FULL'}
-- Safe to repeat: the id and the secret are made once by the caller.
local r = load(KEYS[1])
if not r or r.org ~= ARGV[2] then return {'NOTFOUND'} end
if r.zdr then return {'STATE', r.state} end
local now, expiry = num(ARGV[5]), num(ARGV[6])
local latest = expiry
local all = redis.call('HGETALL', KEYS[2])
for i = 1, #all, 2 do
  local ends = num(string.match(all[i + 1], '^%S+ %d+ (%d+)$'))
  if ends <= now then
    redis.call('HDEL', KEYS[2], all[i])
  elseif ends > latest then
    latest = ends
  end
end
if redis.call('HLEN', KEYS[2]) >= num(ARGV[7]) and redis.call('HEXISTS', KEYS[2], ARGV[3]) == 0 then return {'FULL'} end
redis.call('HSET', KEYS[2], ARGV[3], ARGV[4] .. ' ' .. ARGV[5] .. ' ' .. ARGV[6])
redis.call('PEXPIRE', KEYS[2], int(math.ceil((latest - now) / 1000)))
redis.call('HSET', KEYS[3], 'run', ARGV[1], 'org', ARGV[2], 'expires_us', ARGV[6])
redis.call('PEXPIRE', KEYS[3], int(math.ceil((expiry - now) / 1000)))
return {'OK'}
