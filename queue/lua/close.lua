-- close: end the run, write it into the ledger, and drop what is no longer needed.
-- Survives: a crash in the middle of an abort (the next call continues where it stopped, and the state "closing"
-- keeps anything from being queued meanwhile), a lost reply (closing again returns the same result), and two
-- operators that end the run in different ways at once: the first one decides, and the other learns the outcome.
-- ARGV: group, epoch, run, reason to abort for ('' to finish), outcome for the ledger, retention in ms,
--       retention of the ledger in ms (0: unlimited), most files to move
local RUN, REASON = ARGV[3], ARGV[4]
if lost() then return { 'LOST' } end

-- The run as `close` and `open` report it. If the run is aborted during its listing, this includes how far
-- the listing got.
local function result()
  local c = redis.call('HMGET', META, 'total', 'succeeded', 'failed', 'retried', 'reclaimed', 'listed', 'cursor')
  return c[1], c[2], c[3], c[4], c[5], c[6], c[7]
end

if closed() then return { 'CLOSED', redis.call('HGET', META, 'outcome'), result() } end
-- If data was lost, the remaining count would be too low, and the run could end as a success with files missing.
if not backlog() then return { 'LOST' } end

local function remaining()
  return redis.call('XLEN', WORK) + redis.call('ZCARD', RETRY)
end

if REASON == '' then
  if remaining() > 0 or redis.call('HGET', META, 'listed') ~= '1' then return { 'UNFINISHED', remaining() } end
else
  -- From now on nothing is handed out, and files in inboxes are not worth starting.
  if redis.call('HGET', META, 'state') == 'open' then drop_inboxes() end
  redis.call('HSET', META, 'state', 'closing')
  redis.call('HSETNX', META, 'outcome', ARGV[5])
  redis.call('HSETNX', META, 'reason', REASON)
  redis.call('HDEL', META, 'paused')
  local reason = redis.call('HGET', META, 'reason')
  local limit = tonumber(ARGV[8])
  local moved = 0
  for _, entry in ipairs(redis.call('XRANGE', WORK, '-', '+', 'COUNT', limit)) do
    local message = fields_of(entry)
    redis.call('XACK', WORK, GROUP, entry[1])
    redis.call('XDEL', WORK, entry[1])
    add_dead_letter(RUN, message.file, message.attempts, reason, '', '')
    moved = moved + 1
  end
  if moved < limit then
    for _, member in ipairs(redis.call('ZRANGE', RETRY, 0, limit - moved - 1)) do
      local _, file, attempts = unpack(cjson.decode(member))
      redis.call('ZREM', RETRY, member)
      add_dead_letter(RUN, file, attempts, reason, '', '')
      moved = moved + 1
    end
  end
  redis.call('HINCRBY', META, 'failed', moved)
  if remaining() > 0 then return { 'MORE', remaining() } end
end

local total, succeeded, failed, retried, reclaimed, listed, cursor = result()
local meta = redis.call('HMGET', META, 'owner', 'spec', 'outcome', 'namespace')
local outcome = meta[3] or ARGV[5]
redis.call('HSET', LEDGER, 'owner', meta[1], 'spec', meta[2], 'outcome', outcome, 'closed', now_ms(),
  'total', total, 'succeeded', succeeded, 'failed', failed, 'retried', retried, 'reclaimed', reclaimed,
  'listed', listed, 'cursor', cursor)
-- A queue that an older version opened does not name its namespace.
if meta[4] then redis.call('HSET', LEDGER, 'namespace', meta[4]) end
keep_ledger(ARGV[7])
redis.call('UNLINK', WORK, RETRY, STATES)
redis.call('HSET', META, 'state', 'closed', 'outcome', outcome)
for _, key in ipairs({ META, DLQ, RESULTS }) do redis.call('PEXPIRE', key, ARGV[6]) end
return { 'CLOSED', outcome, result() }
