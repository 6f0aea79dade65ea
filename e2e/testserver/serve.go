package main

import (
	"bufio"
	"encoding/json"
	"errors"
	"fmt"
	"net"
	"net/http"
	"os"
	"os/signal"
	"syscall"
	"time"
)

// answer is what the server says of itself and of the client. The fields are
// the interface to the connectivity checks: the e2e crate parses them.
type answer struct {
	Pod    string `json:"pod"`
	Node   string `json:"node,omitempty"`
	Client string `json:"client"`
	Local  string `json:"local"`
}

func self() answer {
	pod := os.Getenv("POD_NAME")
	if pod == "" {
		pod, _ = os.Hostname()
	}
	return answer{Pod: pod, Node: os.Getenv("NODE_NAME")}
}

func serve(httpAddress, tcpAddress, udpAddress, sctpAddress string) error {
	failed := make(chan error, 4)
	go func() { failed <- serveHTTP(httpAddress) }()
	go func() { failed <- serveTCP(tcpAddress) }()
	go func() { failed <- serveUDP(udpAddress) }()
	if sctpAddress != "" {
		go func() { failed <- serveSCTP(sctpAddress) }()
	}

	stop := make(chan os.Signal, 1)
	signal.Notify(stop, syscall.SIGINT, syscall.SIGTERM)
	select {
	case err := <-failed:
		return err
	case <-stop:
		// A pod that is being deleted goes on serving for a moment: the nodes
		// learn of it only after the kubelet has sent the signal.
		if grace, err := time.ParseDuration(os.Getenv("SHUTDOWN_DELAY")); err == nil {
			time.Sleep(grace)
		}
		return nil
	}
}

// serveHTTP answers / with JSON, /pod with the bare name, and /drip with a
// line a second for as long as the client stays (a long-lived response).
func serveHTTP(address string) error {
	mux := http.NewServeMux()
	local := func(r *http.Request) string {
		if a, ok := r.Context().Value(http.LocalAddrContextKey).(net.Addr); ok {
			return a.String()
		}
		return ""
	}
	mux.HandleFunc("/", func(w http.ResponseWriter, r *http.Request) {
		w.Header().Set("Content-Type", "application/json")
		a := self()
		a.Client, a.Local = r.RemoteAddr, local(r)
		_ = json.NewEncoder(w).Encode(a)
	})
	mux.HandleFunc("/pod", func(w http.ResponseWriter, _ *http.Request) {
		fmt.Fprintln(w, self().Pod)
	})
	mux.HandleFunc("/drip", func(w http.ResponseWriter, r *http.Request) {
		for i := 0; ; i++ {
			if _, err := fmt.Fprintln(w, self().Pod, i); err != nil {
				return
			}
			_ = http.NewResponseController(w).Flush()
			select {
			case <-r.Context().Done():
				return
			case <-time.After(time.Second):
			}
		}
	})
	server := &http.Server{Addr: address, Handler: mux, ReadHeaderTimeout: 10 * time.Second}
	return server.ListenAndServe()
}

// serveTCP greets each connection with one line of JSON and then echoes line
// by line until the client closes, however long that takes.
func serveTCP(address string) error {
	listener, err := net.Listen("tcp", address)
	if err != nil {
		return err
	}
	return serveStreams(listener)
}

// serveSCTP does the same on SCTP.
func serveSCTP(address string) error {
	listener, err := listenSCTP(address)
	if err != nil {
		return err
	}
	return serveStreams(listener)
}

func serveStreams(listener net.Listener) error {
	for {
		conn, err := listener.Accept()
		if err != nil {
			return err
		}
		go func() {
			defer conn.Close()
			a := self()
			a.Client, a.Local = conn.RemoteAddr().String(), conn.LocalAddr().String()
			if json.NewEncoder(conn).Encode(a) != nil {
				return
			}
			lines := bufio.NewReader(conn)
			for {
				line, err := lines.ReadString('\n')
				if line != "" {
					if _, werr := conn.Write([]byte(line)); werr != nil {
						return
					}
				}
				if err != nil {
					return
				}
			}
		}()
	}
}

// serveUDP answers each datagram with one line of JSON.
func serveUDP(address string) error {
	conn, err := net.ListenPacket("udp", address)
	if err != nil {
		return err
	}
	buffer := make([]byte, 64*1024)
	for {
		_, peer, err := conn.ReadFrom(buffer)
		if errors.Is(err, net.ErrClosed) {
			return err
		}
		if err != nil {
			continue
		}
		a := self()
		a.Client, a.Local = peer.String(), conn.LocalAddr().String()
		if data, err := json.Marshal(a); err == nil {
			_, _ = conn.WriteTo(append(data, '\n'), peer)
		}
	}
}
