-- forget: remove the workers' reports about the files of a run.
-- Survives: being called twice, and being called for a run that was refused because its id belongs to another one.
-- ARGV: group, '', owner
local owner = redis.call('HGET', META, 'owner')
if owner and owner ~= ARGV[3] then return { 'TAKEN' } end
redis.call('UNLINK', STATES)
return { 'FORGOTTEN' }
