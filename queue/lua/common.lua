-- What every script begins with. All keys of a run share one hash slot when its id is written in braces.
local WORK, RETRY, DLQ, META, RESULTS, LEDGER = KEYS[1], KEYS[2], KEYS[3], KEYS[4], KEYS[5], KEYS[6]
local GROUP, EPOCH = ARGV[1], ARGV[2]

-- The server's clock is the only one that durations of the queue are measured with.
local function now_ms()
  local time = redis.call('TIME')
  return time[1] * 1000 + math.floor(time[2] / 1000)
end

local function group_exists()
  -- Not the summary, which walks over all consumers.
  return not redis.pcall('XPENDING', WORK, GROUP, '-', '+', 1).err
end

local function closed()
  return redis.call('HGET', META, 'state') == 'closed'
end

-- The queue that this client opened is gone, in whole or in part, or is another one under the same name: its data was
-- lost in between.
local function lost()
  return redis.call('HGET', META, 'epoch') ~= EPOCH or not (closed() or group_exists())
end

local function add_work(run, file, attempts, size, etag)
  return redis.call('XADD', WORK, 'NOMKSTREAM', '*',
    'run', run, 'file', file, 'attempts', attempts, 'size', size, 'etag', etag)
end

local function add_dead_letter(run, file, attempts, reason, exit_code, pod)
  redis.call('XADD', DLQ, '*',
    'run', run, 'file', file, 'attempts', attempts, 'reason', reason, 'exitCode', exit_code, 'pod', pod)
end

local function pairs_of(flat)
  local fields = {}
  for i = 1, #flat, 2 do fields[flat[i]] = flat[i + 1] end
  return fields
end

local function fields_of(entry)
  return pairs_of(entry[2])
end

-- What the server knows of the group. Not XPENDING's summary, which walks over all consumers.
local function group_info()
  for _, group in ipairs(redis.call('XINFO', 'GROUPS', WORK)) do
    local info = pairs_of(group)
    if info.name == GROUP then return info end
  end
end

-- Whether every dead letter was written, and the stream that holds them is there: people may remove single ones.
local function has_dead_letters(failed)
  local stream = redis.pcall('XINFO', 'STREAM', DLQ)
  return failed == 0 or not stream.err and pairs_of(stream)['entries-added'] == failed
end

-- Files that wait (of these: for their back-off) and files that are claimed; or nothing, if with the files that are
-- settled they are not all files that were listed, which is how a part that was lost is noticed.
local function backlog()
  local counts = redis.call('HMGET', META, 'total', 'succeeded', 'failed')
  local total, succeeded, failed = tonumber(counts[1]), tonumber(counts[2]), tonumber(counts[3])
  local running, delayed = group_info().pending, redis.call('ZCARD', RETRY)
  local queued = redis.call('XLEN', WORK) - running + delayed
  local whole = queued >= delayed and total == queued + running + succeeded + failed and has_dead_letters(failed)
  if whole then return queued, running, delayed end
end
