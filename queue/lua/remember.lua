-- remember: add a run to those that this installation knows.
-- Survives: a full server. A name that is missing would let the queue of a run that is removed by force stay forever.
-- ARGV: UID, entry
redis.call('HSET', KEYS[1], ARGV[1], ARGV[2])
