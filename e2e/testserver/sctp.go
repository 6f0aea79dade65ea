package main

import (
	"context"
	"net"
	"net/netip"
	"os"
	"syscall"
	"time"
)

// SCTP, one association a socket: it is used as a TCP connection is, and Go's
// net does so once it has the socket. Kernels without SCTP refuse the socket.

func sctpSocket(family int) (int, error) {
	fd, err := syscall.Socket(family, syscall.SOCK_STREAM|syscall.SOCK_CLOEXEC, syscall.IPPROTO_SCTP)
	return fd, os.NewSyscallError("socket", err)
}

func listenSCTP(address string) (net.Listener, error) {
	at, err := net.ResolveTCPAddr("tcp", address)
	if err != nil {
		return nil, err
	}
	fd, err := sctpSocket(syscall.AF_INET6)
	if err != nil {
		return nil, err
	}
	// net takes a copy.
	defer syscall.Close(fd)
	if err := syscall.Bind(fd, &syscall.SockaddrInet6{Port: at.Port}); err != nil {
		return nil, os.NewSyscallError("bind", err)
	}
	if err := syscall.Listen(fd, 128); err != nil {
		return nil, os.NewSyscallError("listen", err)
	}
	return net.FileListener(os.NewFile(uintptr(fd), "sctp"))
}

func dialSCTP(ctx context.Context, host string) (net.Conn, error) {
	to, err := netip.ParseAddrPort(host)
	if err != nil {
		return nil, err
	}
	var address syscall.Sockaddr = &syscall.SockaddrInet6{Port: int(to.Port()), Addr: to.Addr().As16()}
	family := syscall.AF_INET6
	if to.Addr().Is4() {
		address, family = &syscall.SockaddrInet4{Port: int(to.Port()), Addr: to.Addr().As4()}, syscall.AF_INET
	}
	fd, err := sctpSocket(family)
	if err != nil {
		return nil, err
	}
	defer syscall.Close(fd)
	if deadline, ok := ctx.Deadline(); ok {
		patience := syscall.NsecToTimeval(max(time.Until(deadline), time.Millisecond).Nanoseconds())
		if err := syscall.SetsockoptTimeval(fd, syscall.SOL_SOCKET, syscall.SO_SNDTIMEO, &patience); err != nil {
			return nil, os.NewSyscallError("setsockopt", err)
		}
	}
	if err := syscall.Connect(fd, address); err != nil {
		return nil, os.NewSyscallError("connect", err)
	}
	return net.FileConn(os.NewFile(uintptr(fd), "sctp"))
}
