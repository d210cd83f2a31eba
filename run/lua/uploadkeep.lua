-- uploadkeep: makes an upload whole, so that runs can use it.
-- KEYS: 1 upload, 2 content, 3 idempotency
-- ARGV: 1 upload id, 2 size, 3 SHA-256, 4 now, 5 lifetime (ms), 6 '1' zero data retention, 7 '1' with an idempotency key
-- Returns {'OK', id, values of 'size', 'sha256', 'created_us', 'expires_us', 'zdr'} | {'REPLAY', the same of the upload that the key made} |
--         {'CONFLICT'} (the key made another one) | {'NOTFOUND'} (it took too long) | {'SHORT'} (its content is not whole)
-- After REPLAY and CONFLICT this upload is gone. Safe to repeat.
local upload, content, idem = unpack(KEYS)
local id, now = ARGV[1], tonumber(ARGV[4])

local function answer(code, key, name)
  local v = redis.call('HMGET', key, 'size', 'sha256', 'created_us', 'expires_us', 'zdr')
  return {code, name, v[1], v[2], v[3], v[4], v[5]}
end

local v = redis.call('HMGET', upload, 'state', 'org', 'size', 'zdr')
if v[1] == 'whole' then return answer('OK', upload, id) end
local same = ARGV[3] .. ' ' .. ARGV[2] .. ' ' .. ARGV[6] .. ' '
if ARGV[7] == '1' then
  local seen = redis.call('GET', idem)
  local first = seen and string.match(seen, '(%S+)$')
  if first then
    local before, had = uploadkeys(upload, first)
    local f = redis.call('HMGET', before, 'state', 'size', 'expires_us')
    if f[1] == 'whole' and tonumber(f[3]) > now and redis.call('STRLEN', had) == tonumber(f[2]) then
      discard(upload, id, false)
      if seen == same .. first then return answer('REPLAY', before, first) end
      return {'CONFLICT'}
    end
  end
end
if v[1] ~= 'open' then return {'NOTFOUND'} end
if redis.call('STRLEN', content) ~= tonumber(ARGV[2]) then return {'SHORT'} end
local till = now + 1000 * tonumber(ARGV[5])
unbook(upload, v[2], id, num(v[3]))
book(upload, v[2], id, tonumber(ARGV[2]), till)
redis.call('HSET', upload, 'state', 'whole', 'size', ARGV[2], 'sha256', ARGV[3], 'created_us', int(now), 'expires_us', int(till))
redis.call('PEXPIRE', upload, ARGV[5])
redis.call('PEXPIRE', content, ARGV[5])
if v[4] == '1' then redis.call('ZADD', string.match(upload, '^{[^}]*}:') .. 'uploads', int(math.floor(till / 1000)), id) end
if ARGV[7] == '1' then redis.call('SET', idem, same .. id, 'PX', ARGV[5]) end
return answer('OK', upload, id)
