#!/bin/sh
# Finishes the root filesystem of an image. mmdebstrap runs it on the host, as root, with the root filesystem's directory.
# Beside this script: "kernel" holds the name of the wanted kernel package; its .deb and "packages" are written there.
set -eu
root=$1
work=$(dirname "$0")

# The kernel is taken from its package, not installed: its maintainer scripts would ask for an initramfs generator.
export APT_CONFIG="$MMDEBSTRAP_APT_CONFIG"
meta=$(cat "$work/kernel")
kernel=$(apt-cache depends --important "$meta" | sed -n 's/^ *Depends: *\(linux-image-[0-9][^ ]*\)$/\1/p' | head -n 1)
(cd "$work" && apt-get -q -o APT::Sandbox::User=root download "${kernel:-$meta}")

chroot "$root" groupadd --gid 1000 worker
chroot "$root" useradd --uid 1000 --gid 1000 --create-home --home-dir /home/worker --shell /bin/bash worker

# With the time of every file fixed, bytecode that is checked against the source's time would be thrown away at each start.
# The order of sets in bytecode follows the hash seed. Files that do not compile (templates, say) stay as they are.
if [ -x "$root/usr/bin/python3" ]; then
	find "$root/usr/lib" -depth -name __pycache__ -exec rm -rf {} +
	PYTHONHASHSEED=0 chroot "$root" sh -c \
		'python3 -m compileall -q --invalidation-mode unchecked-hash /usr/lib/python3* 2>/dev/null || true'
fi

chroot "$root" dpkg-query -W -f '${Package} ${Version}\n' >"$work/packages"

# Name resolution fails at once: there is no way out of a machine.
rm -f "$root/etc/resolv.conf"
: >"$root/etc/resolv.conf"
echo ephemeral >"$root/etc/hostname"
printf '127.0.0.1\tlocalhost\n' >"$root/etc/hosts"
# Set in each machine.
: >"$root/etc/machine-id"

# What differs from build to build or is of no use in a machine.
rm -rf "$root"/var/log/* "$root"/var/cache/* "$root"/var/lib/apt/lists/* "$root"/var/backups/* "$root"/tmp/* "$root"/run/* \
	"$root"/usr/share/doc/* "$root"/usr/share/man/* "$root"/usr/share/info/* "$root"/usr/share/locale/* \
	"$root"/usr/share/lintian "$root"/usr/share/bash-completion "$root"/boot/* "$root"/usr/lib/modules \
	"$root"/etc/passwd- "$root"/etc/group- "$root"/etc/shadow- "$root"/etc/gshadow- "$root"/etc/subuid- "$root"/etc/subgid- \
	"$root"/var/lib/dpkg/*-old "$root"/etc/apt/apt.conf.d/99mmdebstrap "$root"/etc/dpkg/dpkg.cfg.d/99mmdebstrap
