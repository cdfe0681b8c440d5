-- begin: note when the run began, so that one clock measures its age, regardless of which operator asks.
-- Survives: an operator that crashes afterwards (the first call counts), and a successor whose clock differs.
-- ARGV: group, epoch, age of the run in ms (0 for a new run)
if lost() then return { 'LOST' } end
redis.call('HSETNX', META, 'begun', now_ms() - tonumber(ARGV[3]))
return { 'OK', age() }
