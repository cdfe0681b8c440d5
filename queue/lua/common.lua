-- The beginning of every script. If the run's id is written in braces, all its keys share one hash slot.
local WORK, RETRY, DLQ, META, RESULTS, LEDGER, STATES = KEYS[1], KEYS[2], KEYS[3], KEYS[4], KEYS[5], KEYS[6], KEYS[7]
local GROUP, EPOCH = ARGV[1], ARGV[2]

-- All durations of the queue are measured with the server's clock alone.
local function now_ms()
  local time = redis.call('TIME')
  return time[1] * 1000 + math.floor(time[2] / 1000)
end

-- How long ago the run began, in ms; -1 if unknown.
local function age()
  local begun = redis.call('HGET', META, 'begun')
  return begun and math.max(0, now_ms() - begun) or -1
end

local function pairs_of(flat)
  local fields = {}
  for i = 1, #flat, 2 do fields[flat[i]] = flat[i + 1] end
  return fields
end

-- The server's information about the group; nil if the group is gone. It does not come from XPENDING, which
-- returns consumer names: claimers of older versions could choose names of any length.
local function group_info()
  local groups = redis.pcall('XINFO', 'GROUPS', WORK)
  if groups.err then return nil end
  for _, group in ipairs(groups) do
    local info = pairs_of(group)
    if info.name == GROUP then return info end
  end
end

-- The stream in which a worker finds its files.
local INBOX = WORK:sub(1, -#'work' - 1) .. 'inbox:'
local function inbox_of(pod)
  return INBOX .. pod
end

-- Deletes the inboxes and the workers' reports, which are useless without the stream.
local function drop_inboxes()
  redis.call('UNLINK', STATES)
  local consumers = redis.pcall('XINFO', 'CONSUMERS', WORK, GROUP)
  if consumers.err then return end
  for _, consumer in ipairs(consumers) do redis.call('UNLINK', inbox_of(pairs_of(consumer).name)) end
end

local function closed()
  return redis.call('HGET', META, 'state') == 'closed'
end

-- Whether data was lost: the queue that this client opened is gone, in whole or in part, or was replaced by
-- another one of the same name.
local function lost()
  return redis.call('HGET', META, 'epoch') ~= EPOCH or not (closed() or group_info())
end

local function add_work(run, file, attempts, disruptions, size, etag)
  return redis.call('XADD', WORK, 'NOMKSTREAM', '*',
    'run', run, 'file', file, 'attempts', attempts, 'disruptions', disruptions, 'size', size, 'etag', etag)
end

local function add_dead_letter(run, file, attempts, reason, exit_code, pod)
  redis.call('XADD', DLQ, '*',
    'run', run, 'file', file, 'attempts', attempts, 'reason', reason, 'exitCode', exit_code, 'pod', pod)
end

-- The message of an entry. Entries of older versions have no disruptions.
local function fields_of(entry)
  local message = pairs_of(entry[2])
  message.disruptions = message.disruptions or '0'
  return message
end

-- Moves an entry without a holder to the end of the stream, unchanged.
local function requeue(run, id, message)
  redis.call('XDEL', WORK, id)
  add_work(run, message.file, message.attempts, message.disruptions, message.size, message.etag)
end

-- Makes the ledger forget the run this long after it was last seen; 0 means never.
local function keep_ledger(milliseconds)
  if milliseconds == '0' then
    redis.call('PERSIST', LEDGER)
  else
    redis.call('PEXPIRE', LEDGER, milliseconds)
  end
end

-- Whether every dead letter was written and their stream still exists. Users may delete individual dead letters.
local function has_dead_letters(failed)
  local stream = redis.pcall('XINFO', 'STREAM', DLQ)
  return failed == 0 or not stream.err and pairs_of(stream)['entries-added'] == failed
end

-- The number of waiting files, of claimed files, and of waiting files in back-off. Returns nothing if these
-- and the settled files do not add up to all listed files, which shows that data was lost.
local function backlog()
  local counts = redis.call('HMGET', META, 'total', 'succeeded', 'failed')
  local total, succeeded, failed = tonumber(counts[1]), tonumber(counts[2]), tonumber(counts[3])
  local running, delayed = group_info().pending, redis.call('ZCARD', RETRY)
  local queued = redis.call('XLEN', WORK) - running + delayed
  local whole = queued >= delayed and total == queued + running + succeeded + failed and has_dead_letters(failed)
  if whole then return queued, running, delayed end
end
