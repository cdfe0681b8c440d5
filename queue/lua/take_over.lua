-- take_over: give the queue of a run to the same run under a new UID, after it was restored from a backup or
-- created again.
-- Survives: two objects that take over at once (the UID must still be the old one), and a lost reply.
-- ARGV: group, '', old UID, new UID, namespace, name
local meta = redis.call('HMGET', META, 'owner', 'namespace', 'name')
-- Entries of older versions do not name their owner, and are left alone.
if meta[2] ~= ARGV[5] or meta[3] ~= ARGV[6] then return { 'REFUSED' } end
if meta[1] == ARGV[4] then return { 'OK' } end
if meta[1] ~= ARGV[3] then return { 'REFUSED' } end
-- The next `open` knows the spec, and decides whether it is the same run.
redis.call('HSET', META, 'owner', ARGV[4], 'takenOver', '1')
-- The new object has its own start time.
redis.call('HDEL', META, 'begun')
return { 'OK' }
