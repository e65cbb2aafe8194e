py={python}; [ -x "$py" ] || py=python3
dir={folder}; cd {here} 2>/dev/null || cd "$dir"
export {variables}
export OMP_NUM_THREADS="${{OMP_NUM_THREADS:-$(( ($(nproc) + {ranks} - 1) / {ranks} ))}}"
exec 3<&0
"$py" -m torch.distributed.run --nnodes {hosts} --node-rank {number} --nproc-per-node {ranks} \
  --master-addr {master} --master-port {port} "$dir"/launch.py {arguments} </dev/null 3<&- &
torchrun=$!
(read -r stop <&3 && kill $torchrun; cat <&3; kill $torchrun; sleep 10; kill -KILL $torchrun) >/dev/null 2>&1 &
watcher=$!
exec 3<&-
wait $torchrun; code=$?
kill $watcher
exit $code
