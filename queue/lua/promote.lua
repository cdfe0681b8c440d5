-- promote: move files whose back-off is over to the stream.
-- Survives: a crash in between, and two operators that promote at once: neither sees files that the other has
-- already moved.
-- ARGV: group, epoch, run, most to move
if lost() then return { 'LOST' } end
if closed() then return { 'OK', 0, -1 } end

local now = now_ms()
local due = redis.call('ZRANGEBYSCORE', RETRY, '-inf', now, 'LIMIT', 0, ARGV[4])
for _, member in ipairs(due) do
  -- Members of older versions have no disruptions.
  local _, file, attempts, size, etag, disruptions = unpack(cjson.decode(member))
  redis.call('ZREM', RETRY, member)
  add_work(ARGV[3], file, attempts, disruptions or 0, size, etag)
end
local next_due = redis.call('ZRANGE', RETRY, 0, 0, 'WITHSCORES')[2]
return { 'OK', #due, next_due and math.max(0, math.ceil(next_due - now)) or -1 }
