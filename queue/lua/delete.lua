-- delete: remove everything of a run except its entry in the ledger.
-- Survives: being called twice, and being called by an owner whose id another run has taken since.
-- ARGV: group, '', owner
local owner = redis.call('HGET', META, 'owner')
if owner and owner ~= ARGV[3] then return { 'TAKEN', owner } end
drop_inboxes()
return { 'DELETED', redis.call('UNLINK', WORK, RETRY, DLQ, META, RESULTS) }
