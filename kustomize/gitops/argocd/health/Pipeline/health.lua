-- Healthy: valid, and its credentials are there. Degraded: a run of it would wait.
local health = { status = "Progressing", message = "waiting for the operator" }
if obj.status == nil or obj.status.conditions == nil then
  return health
end
if obj.status.observedGeneration ~= obj.metadata.generation then
  health.message = "waiting for the operator to see the change"
  return health
end
for _, condition in ipairs(obj.status.conditions) do
  if condition.type == "Ready" then
    health.message = condition.reason .. ": " .. condition.message
    if condition.status == "True" then
      health.status = "Healthy"
    elseif condition.status == "False" then
      health.status = "Degraded"
    end
  end
end
return health
