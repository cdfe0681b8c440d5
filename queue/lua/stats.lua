-- stats: return every count of the run at one instant.
-- Survives: partial loss. A key that was evicted or deleted makes the sum wrong, and a wrong sum is never reported.
-- ARGV: group, epoch
if lost() then return { 'LOST' } end
local meta = redis.call('HMGET', META, 'state', 'cursor', 'listed', 'total', 'succeeded', 'failed', 'retried',
  'reclaimed', 'disrupted', 'started', 'paused', 'skipped', 'canary')
local queued, running, delayed, next_due = 0, 0, 0, -1
if meta[1] ~= 'closed' then
  queued, running, delayed = backlog()
  if not queued then return { 'LOST' } end
  local due = redis.call('ZRANGE', RETRY, 0, 0, 'WITHSCORES')[2]
  if due then next_due = math.max(0, math.ceil(due - now_ms())) end
end
local started = (meta[3] == '1' or meta[10] == '1') and 1 or 0
return { 'OK', meta[1], meta[2], meta[3], tonumber(meta[4]), queued, running, tonumber(meta[5]), tonumber(meta[6]),
  tonumber(meta[7]), tonumber(meta[8]), tonumber(meta[9] or 0), delayed, next_due, started, meta[11] or '', age(), tonumber(meta[12] or 0), meta[13] or '' }
