-- renew: extends a lease and tells whether the run was asked to cancel.
-- KEYS: 1 run, 2 leases    ARGV: 1 run id, 2 token, 3 end of the lease
-- Returns {'OK', '1' cancel asked | '0'} | {'LEASE'}
local r = load(KEYS[1])
if not leased(r, tonumber(ARGV[2])) then return {'LEASE'} end
redis.call('HSET', KEYS[1], 'lease_us', ARGV[3])
redis.call('ZADD', KEYS[2], ARGV[3], ARGV[1])
return {'OK', r.cancel and '1' or '0'}
