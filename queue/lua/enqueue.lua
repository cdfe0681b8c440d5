-- enqueue: add one page of the listing, count its skipped files, and move the cursor, unless enough files
-- already wait.
-- Survives: a crash or lost reply between adding files and moving the cursor: both happen or neither, and a page that
-- is sent twice is added once, because the cursor has moved. Also, a bucket that exceeds the memory: the listing
-- pauses and the pause is recorded, so that the files listed so far are processed meanwhile.
-- ARGV: group, epoch, run, expected cursor, next cursor, listing is complete (0 or 1), high water, files of a full page,
--       files that the page skipped, then file, size, etag of each file
local HIGH_WATER, PAGE = tonumber(ARGV[7]), tonumber(ARGV[8])
-- The last fifth of the memory is reserved for outcomes: dead letters, results, the ledger.
local MEMORY_FOR_FILES = 0.8

if lost() then return { 'LOST' } end
local meta = redis.call('HMGET', META, 'state', 'cursor', 'listed', 'paused')
if meta[1] ~= 'open' or meta[3] == '1' or meta[2] ~= ARGV[4] then
  return { 'SUPERSEDED', meta[2], meta[1] == 'open' and meta[3] or '1' }
end

-- The fraction of its memory limit that the server uses. The script must check, because it may write even to
-- a full server.
local function memory_used()
  local info = redis.call('INFO', 'memory')
  local function number(name)
    return tonumber(info:match('\n' .. name .. ':(%d+)') or 0)
  end
  local limit = number('maxmemory')
  if limit == 0 then return 0 end
  return (number('used_memory') - number('mem_not_counted_for_evict')) / limit
end

-- A paused listing stays paused until the number of files drops to half of the mark, so that neither listing
-- nor pods stop and start with every page.
local function is_over(mark)
  return redis.call('XLEN', WORK) + redis.call('ZCARD', RETRY) >= (meta[4] and mark / 2 or mark)
end

local function reason_to_pause()
  if is_over(HIGH_WATER) then return 'high-water' end
  local used = memory_used()
  if used >= 1 or used > MEMORY_FOR_FILES and is_over(PAGE) then return 'memory' end
end

local files = (#ARGV - 9) / 3
-- A page without files needs no memory.
local pause = files > 0 and reason_to_pause()
if pause then
  if meta[4] ~= pause then redis.call('HSET', META, 'paused', pause, 'started', '1') end
  return { 'PAUSED', pause }
end

for i = 10, #ARGV, 3 do
  add_work(ARGV[3], ARGV[i], '0', '0', ARGV[i + 1], ARGV[i + 2])
end
redis.call('HSET', META, 'cursor', ARGV[5], 'listed', ARGV[6])
if ARGV[9] ~= '0' then redis.call('HINCRBY', META, 'skipped', ARGV[9]) end
if meta[4] and (files > 0 or ARGV[6] == '1') then redis.call('HDEL', META, 'paused') end
return { 'ADDED', redis.call('HINCRBY', META, 'total', files) }
