// Command testserver is what the test cluster's pods run: a server that tells
// which pod answered and which client it saw, over HTTP, TCP and UDP; a prober
// that counts what a constant stream of requests met; and the pause container.
// On a virtual machine it also runs the commands that the test cluster sends.
package main

import (
	"flag"
	"fmt"
	"os"
	"os/signal"
	"syscall"
	"time"
)

const usage = `usage:
  testserver serve [-http :8080] [-tcp :9000] [-udp :9001] [-sctp :9002]
  testserver probe [-timeout 2s] [-interval 50ms] [-duration 1m] [-count N] [-stream] http://HOST:PORT/|tcp://HOST:PORT|udp://HOST:PORT|sctp://HOST:PORT
  testserver pause
  testserver remote-serve ADDRESS:PORT PEER
  testserver remote ADDRESS:PORT WORD...`

func main() {
	if len(os.Args) < 2 {
		fmt.Fprintln(os.Stderr, usage)
		os.Exit(2)
	}
	var err error
	switch args := os.Args[2:]; os.Args[1] {
	case "serve":
		flags := flag.NewFlagSet("serve", flag.ExitOnError)
		http := flags.String("http", ":8080", "address of the HTTP server")
		tcp := flags.String("tcp", ":9000", "address of the TCP echo server")
		udp := flags.String("udp", ":9001", "address of the UDP echo server")
		sctp := flags.String("sctp", "", "address of the SCTP echo server; none if empty")
		_ = flags.Parse(args)
		err = serve(*http, *tcp, *udp, *sctp)
	case "probe":
		flags := flag.NewFlagSet("probe", flag.ExitOnError)
		var o options
		flags.DurationVar(&o.timeout, "timeout", 2*time.Second, "how long one request may take")
		flags.DurationVar(&o.interval, "interval", 50*time.Millisecond, "time between two requests")
		flags.DurationVar(&o.duration, "duration", time.Minute, "how long to probe at most; SIGTERM ends it sooner")
		flags.IntVar(&o.count, "count", 0, "how many requests to send at most; 0 for no such limit")
		flags.BoolVar(&o.stream, "stream", false, "send all over one TCP connection, or from one UDP port")
		_ = flags.Parse(args)
		if flags.NArg() != 1 {
			fmt.Fprintln(os.Stderr, usage)
			os.Exit(2)
		}
		err = probe(flags.Arg(0), o)
	case "pause":
		pause()
	case "remote-serve":
		if len(args) != 2 {
			fmt.Fprintln(os.Stderr, usage)
			os.Exit(2)
		}
		err = remoteServe(args[0], args[1])
	case "remote":
		if len(args) < 2 {
			fmt.Fprintln(os.Stderr, usage)
			os.Exit(2)
		}
		err = remote(args[0], args[1:])
	default:
		fmt.Fprintln(os.Stderr, usage)
		os.Exit(2)
	}
	if err != nil {
		fmt.Fprintln(os.Stderr, "testserver:", err)
		os.Exit(1)
	}
}

// pause holds a pod's namespaces open. As process 1 it reaps what the pod's
// other containers orphan.
func pause() {
	signals := make(chan os.Signal, 8)
	signal.Notify(signals, syscall.SIGINT, syscall.SIGTERM, syscall.SIGCHLD)
	for s := range signals {
		if s != syscall.SIGCHLD {
			return
		}
		for {
			if pid, err := syscall.Wait4(-1, nil, syscall.WNOHANG, nil); pid <= 0 || err != nil {
				break
			}
		}
	}
}
