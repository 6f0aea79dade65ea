package main

import (
	"encoding/binary"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net"
	"os"
	"os/exec"
	"os/signal"
	"sync"
	"syscall"
)

// Commands on a machine that shares no process or namespace with us: one
// connection a command. The client sends the words as JSON, then input and
// signals; the server sends output and, at last, the exit status. A connection
// that ends kills the command.
//
// A frame is its kind, the length of what follows (4 bytes), and that.
const (
	frameWords  = 'w'
	frameInput  = 'i' // empty: no more input
	frameSignal = 's'
	frameOutput = 'o'
	frameErrors = 'e'
	frameStatus = 'x'
)

const frameLimit = 1 << 20

type frames struct {
	net.Conn
	mutex sync.Mutex
}

func (f *frames) send(kind byte, data []byte) error {
	f.mutex.Lock()
	defer f.mutex.Unlock()
	header := binary.BigEndian.AppendUint32([]byte{kind}, uint32(len(data)))
	_, err := f.Write(append(header, data...))
	return err
}

func (f *frames) receive() (kind byte, data []byte, err error) {
	var header [5]byte
	if _, err := io.ReadFull(f, header[:]); err != nil {
		return 0, nil, err
	}
	length := binary.BigEndian.Uint32(header[1:])
	if length > frameLimit {
		return 0, nil, fmt.Errorf("a frame of %d bytes", length)
	}
	data = make([]byte, length)
	_, err = io.ReadFull(f, data)
	return header[0], data, err
}

// sender is a writer each of whose writes is a frame.
type sender struct {
	to   *frames
	kind byte
}

func (s sender) Write(data []byte) (int, error) {
	return len(data), s.to.send(s.kind, data)
}

// remoteServe runs what the machine with the address peer asks for. Nobody
// else may: whoever can run commands here is root.
func remoteServe(address, peer string) error {
	listener, err := net.Listen("tcp", address)
	if err != nil {
		return err
	}
	for {
		conn, err := listener.Accept()
		if err != nil {
			return err
		}
		if from, _, _ := net.SplitHostPort(conn.RemoteAddr().String()); from != peer {
			conn.Close()
			continue
		}
		go func() {
			defer conn.Close()
			f := &frames{Conn: conn}
			status, err := runFor(f)
			if err != nil {
				_ = f.send(frameErrors, fmt.Appendf(nil, "%v\n", err))
				status = 127
			}
			_ = f.send(frameStatus, []byte{byte(status)})
		}()
	}
}

func runFor(f *frames) (int, error) {
	kind, data, err := f.receive()
	if err != nil {
		return 0, err
	}
	var words []string
	if err := json.Unmarshal(data, &words); kind != frameWords || err != nil || len(words) == 0 {
		return 0, errors.New("no command")
	}
	command := exec.Command(words[0], words[1:]...)
	command.Dir = "/"
	command.SysProcAttr = &syscall.SysProcAttr{Setpgid: true}
	command.Stdout, command.Stderr = sender{f, frameOutput}, sender{f, frameErrors}
	input, err := command.StdinPipe()
	if err != nil {
		return 0, err
	}
	if err := command.Start(); err != nil {
		return 0, err
	}
	go func() {
		for {
			kind, data, err := f.receive()
			switch {
			case err != nil:
				_ = syscall.Kill(-command.Process.Pid, syscall.SIGKILL)
				return
			case kind == frameSignal && len(data) == 1:
				_ = command.Process.Signal(syscall.Signal(data[0]))
			case kind == frameInput && len(data) == 0:
				_ = input.Close()
			case kind == frameInput:
				_, _ = input.Write(data)
			}
		}
	}()
	err = command.Wait()
	var exit *exec.ExitError
	if errors.As(err, &exit) {
		if status := exit.Sys().(syscall.WaitStatus); status.Signaled() {
			return 128 + int(status.Signal()), nil
		}
		return exit.ExitCode(), nil
	}
	return 0, err
}

// remote runs words on the machine whose server has this address, and ends as
// they do.
func remote(address string, words []string) error {
	conn, err := net.Dial("tcp", address)
	if err != nil {
		return err
	}
	f := &frames{Conn: conn}
	data, err := json.Marshal(words)
	if err != nil {
		return err
	}
	signals := make(chan os.Signal, 8)
	signal.Notify(signals, syscall.SIGINT, syscall.SIGTERM, syscall.SIGHUP, syscall.SIGUSR1, syscall.SIGUSR2)
	if err := f.send(frameWords, data); err != nil {
		return err
	}
	go func() {
		for s := range signals {
			_ = f.send(frameSignal, []byte{byte(s.(syscall.Signal))})
		}
	}()
	go func() {
		_, _ = io.Copy(sender{f, frameInput}, os.Stdin)
		_ = f.send(frameInput, nil)
	}()
	for {
		kind, data, err := f.receive()
		if err != nil {
			return fmt.Errorf("the machine at %s is gone: %w", address, err)
		}
		switch kind {
		case frameOutput:
			_, err = os.Stdout.Write(data)
		case frameErrors:
			_, err = os.Stderr.Write(data)
		case frameStatus:
			if len(data) == 1 {
				os.Exit(int(data[0]))
			}
		}
		if err != nil {
			return err
		}
	}
}
