-- stats: every count of the run at one instant.
-- Survives: partial loss. A key that was evicted or deleted makes the sum wrong, and a wrong sum is never reported.
-- ARGV: group, epoch
if lost() then return { 'LOST' } end
local meta = redis.call('HMGET', META, 'state', 'cursor', 'listed', 'total', 'succeeded', 'failed', 'retried', 'reclaimed')
local queued, running, next_due = 0, 0, -1
if meta[1] ~= 'closed' then
  running = redis.call('XPENDING', WORK, GROUP)[1]
  queued = redis.call('XLEN', WORK) - running + redis.call('ZCARD', RETRY)
  local due = redis.call('ZRANGE', RETRY, 0, 0, 'WITHSCORES')[2]
  if due then next_due = math.max(0, math.ceil(due - now_ms())) end
end
local total, succeeded, failed = tonumber(meta[4]), tonumber(meta[5]), tonumber(meta[6])
if queued < 0 or total ~= queued + running + succeeded + failed then return { 'LOST' } end
-- Dead letters are what people look for afterwards; those of a closed run expire.
if meta[1] ~= 'closed' and failed ~= redis.call('XLEN', DLQ) then return { 'LOST' } end
return { 'OK', meta[1], meta[2], meta[3], total, queued, running, succeeded, failed,
  tonumber(meta[7]), tonumber(meta[8]), next_due }
