#!/bin/sh
# The first process inside: makes a root of the host's files that can be written and is thrown away, loads modules, runs
# /run/uml/script, and says in /run/uml/status how it ended.
export PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin
mount -t proc proc /proc
modules=/usr/lib/uml/modules/$(uname -r)

finish() {
  echo "$1" >/run/uml/status
  sync
  echo 1 >/proc/sys/kernel/sysrq
  echo o >/proc/sysrq-trigger
  sleep 60
}
failed() {
  echo "uml: $*" >&2
  finish 125
}

# hostfs itself is mounted read-only: what is written goes to memory.
mount -t hostfs -o /run/uml none /run/uml || failed "mounting the folder that is shared with the host"
insmod "$modules/kernel/fs/overlayfs/overlay.ko" || failed "loading overlay"
mount -t tmpfs tmpfs /mnt && mkdir /mnt/upper /mnt/work /mnt/root &&
  mount -t overlay -o lowerdir=/,upperdir=/mnt/upper,workdir=/mnt/work overlay /mnt/root || failed "mounting the root"
root=/mnt/root
mount -t proc proc $root/proc
mount -t sysfs sysfs $root/sys
mount -t cgroup2 cgroup2 $root/sys/fs/cgroup
mount -t devtmpfs devtmpfs $root/dev
mkdir -p $root/dev/pts $root/dev/shm $root/old $root/lib/modules
mount -t devpts devpts $root/dev/pts
mount -t tmpfs tmpfs $root/dev/shm
mount -t tmpfs -o mode=755 tmpfs $root/run
mkdir $root/run/uml $root/run/lock
mount --bind /run/uml $root/run/uml
ln -s "$modules" "$root/lib/modules/$(uname -r)"
# Of iptables, only the legacy flavour works: the kernel has no nft NAT chains.
for program in iptables ip6tables; do
  for end in "" -save -restore; do
    [ ! -e /usr/sbin/$program-legacy$end ] || ln -sf /usr/sbin/$program-legacy$end $root/etc/alternatives/$program$end
  done
done
cd $root && pivot_root . old && cd / || failed "entering the root"
umount -l /old && rmdir /old
mount --make-rshared /
while read -r folder || [ -n "$folder" ]; do
  mount -t hostfs -o "$folder" none "$folder" || failed "sharing $folder"
done </run/uml/shared

# Not sctp: the tests that speak it through raw sockets would be answered by the kernel too. Its sockets load it.
wanted='ip_vs|ip_set|xt_|ip_tables|ip6_tables|iptable_|ip6table_|ipt_REJECT|ip6t_REJECT'
# What other modules would pull in, or have no use here.
unwanted='ip_vs_ftp|ip_vs_pe_sip|xt_SECMARK|xt_CONNSECMARK|xt_TRACE|xt_TEE|xt_AUDIT'
names=$(sed -nE "s,^[^:]*/(($wanted)[^/:]*)\.ko:.*,\1,p" "$modules/modules.dep" | grep -vxE "$unwanted")
modprobe -a ipv6 dummy veth bridge br_netfilter nf_conntrack nf_conntrack_netlink nf_nat $names || failed "loading modules"
ip link set lo up

# Through pipes, so that programs do not take the lines to the host for terminals. They are emptied before the end, but not
# waited for if something that the command left holds them.
mkfifo /run/out /run/err
cat /run/out >/dev/ttyS0 & out=$!
cat /run/err >/dev/ttyS1 & err=$!
(
  . /run/uml/environment
  . /run/uml/script
) >/run/out 2>/run/err </dev/null
status=$?
(sleep 2; kill $out $err) &
wait $out $err
finish $status
