# Outside, in mount and process namespaces of its own, where /run is empty and all of this is gone when this shell ends:
#   sh host.sh PRELOAD INIT SCRIPT SHARED-FOLDERS LINUX-ARGUMENT...
set -eu
preload=$1 init=$2 script=$3 shared=$4
shift 4
mount -t tmpfs -o mode=755,size=100% tmpfs /run
mkdir -p /run/uml/tmp
cp "$init" /run/uml/init
printf '%s' "$script" >/run/uml/script
printf '%s' "$shared" >/run/uml/shared
export -p >/run/uml/environment
chmod 755 /run/uml/init
# Its memory is a file in TMPDIR. What its console says matters only if it does not come to the end. Pipes, since it
# changes the settings of whatever it is given.
{
  {
    LD_PRELOAD=$preload TMPDIR=/run/uml/tmp linux.uml "$@" \
      root=/dev/root rootfstype=hostfs rootflags=/ ro quiet init=/run/uml/init uml_dir=/run/uml/id con=null con0=null,fd:1 \
      ssl=null ssl0=null,fd:3 ssl1=null,fd:4 3>&5 4>&1 >/run/uml/console 2>&1 </dev/null || true
  } | cat >&2
} 5>&1 | cat
if ! [ -s /run/uml/status ]; then
  cat /run/uml/console >&2
  echo "uml: user-mode-linux ended before the command did" >&2
  exit 125
fi
exit "$(cat /run/uml/status)"
