-- begin: note when the run began, so that its age is measured by one clock, whichever operator asks.
-- Survives: an operator that crashes after it (the first call counts), and one whose clock differs from its predecessor's.
-- ARGV: group, epoch, age in ms that the run has already, 0 for a new one
if lost() then return { 'LOST' } end
redis.call('HSETNX', META, 'begun', now_ms() - tonumber(ARGV[3]))
return { 'OK', age() }
