package main

import (
	"bufio"
	"context"
	"encoding/json"
	"fmt"
	"net"
	"net/url"
	"os"
	"os/signal"
	"strings"
	"syscall"
	"time"
)

// summary is printed as one line of JSON when the probe ends. The fields are
// the interface to the connectivity checks: the e2e crate parses them.
type summary struct {
	Requests int `json:"requests"`
	Failed   int `json:"failed"`
	// Pods counts the answers of each pod.
	Pods map[string]int `json:"pods"`
	// Clients counts the source addresses that the pods saw.
	Clients map[string]int `json:"clients"`
	Errors  map[string]int `json:"errors"`
	// LongestGapMs is the longest time without a success.
	LongestGapMs int64 `json:"longestGapMs"`
	// FirstFailure is when the first request that failed was sent, to be looked
	// for in logs.
	FirstFailure string `json:"firstFailure,omitempty"`
}

type options struct {
	timeout, interval, duration time.Duration
	// count ends the probe after that many requests; 0 leaves it to duration.
	count int
	// stream keeps one TCP connection, or one UDP port, and sends every request
	// over it, so that a failure is a broken flow; it then begins another.
	stream bool
}

// probe sends one request after the other, each over a new connection (a new
// decision of the service proxy), and counts what came back. It always ends by
// itself. Failures are in the summary, not in the exit code.
func probe(target string, o options) error {
	to, err := url.Parse(target)
	if err != nil {
		return err
	}
	var ask func(context.Context) (answer, error)
	switch {
	case o.stream && to.Scheme == "tcp":
		s := &stream{host: to.Host}
		defer s.close()
		ask = s.ask
	case o.stream && to.Scheme == "udp":
		f := &flow{host: to.Host}
		defer f.close()
		ask = f.ask
	case o.stream:
		return fmt.Errorf("%s: -stream needs a tcp:// or udp:// target", target)
	case to.Scheme == "http":
		ask = func(ctx context.Context) (answer, error) { return askHTTP(ctx, to.Host) }
	case to.Scheme == "tcp" || to.Scheme == "udp" || to.Scheme == "sctp":
		ask = func(ctx context.Context) (answer, error) { return askLine(ctx, to.Scheme, to.Host) }
	default:
		return fmt.Errorf("%s: the scheme must be http, tcp, udp or sctp", target)
	}
	ctx, cancel := context.WithTimeout(context.Background(), o.duration)
	defer cancel()
	ctx, stop := signal.NotifyContext(ctx, syscall.SIGINT, syscall.SIGTERM)
	defer stop()

	result := summary{Pods: map[string]int{}, Clients: map[string]int{}, Errors: map[string]int{}}
	lastSuccess := time.Now()
	ticker := time.NewTicker(o.interval)
	defer ticker.Stop()
	for ctx.Err() == nil && (o.count == 0 || result.Requests < o.count) {
		// Not derived from ctx: the end of the probe is no failure of the request.
		request, done := context.WithTimeout(context.Background(), o.timeout)
		sent := time.Now()
		a, err := ask(request)
		done()
		result.Requests++
		now := time.Now()
		if gap := now.Sub(lastSuccess).Milliseconds(); gap > result.LongestGapMs {
			result.LongestGapMs = gap
		}
		if err != nil {
			if result.Failed == 0 {
				result.FirstFailure = sent.UTC().Format(time.RFC3339Nano)
			}
			result.Failed++
			result.Errors[err.Error()]++
		} else {
			result.Pods[a.Pod]++
			if host, _, err := net.SplitHostPort(a.Client); err == nil {
				result.Clients[host]++
			}
			lastSuccess = now
		}
		select {
		case <-ctx.Done():
		case <-ticker.C:
		}
	}
	return json.NewEncoder(os.Stdout).Encode(result)
}

// stream is one TCP connection to the echo server that lives as long as it can.
type stream struct {
	host  string
	conn  net.Conn
	lines *bufio.Reader
	peer  answer
	sent  int
}

func (s *stream) close() {
	if s.conn != nil {
		_ = s.conn.Close()
		s.conn = nil
	}
}

func (s *stream) ask(ctx context.Context) (answer, error) {
	a, err := s.echo(ctx)
	if err != nil {
		s.close()
	}
	return a, err
}

func (s *stream) echo(ctx context.Context) (answer, error) {
	if s.conn == nil {
		conn, err := connect(ctx, "tcp", s.host)
		if err != nil {
			return answer{}, err
		}
		s.conn, s.lines = conn, bufio.NewReader(conn)
		greeting, err := s.lines.ReadString('\n')
		if err != nil {
			return answer{}, short(err)
		}
		if s.peer, err = parse(greeting); err != nil {
			return answer{}, err
		}
	}
	if deadline, ok := ctx.Deadline(); ok {
		_ = s.conn.SetDeadline(deadline)
	}
	s.sent++
	want := fmt.Sprintln("echo", s.sent)
	if _, err := s.conn.Write([]byte(want)); err != nil {
		return answer{}, short(err)
	}
	got, err := s.lines.ReadString('\n')
	if err != nil {
		return answer{}, short(err)
	}
	if got != want {
		return answer{}, fmt.Errorf("the echo differs from what was sent")
	}
	return s.peer, nil
}

// flow is one UDP port that all requests are sent from.
type flow struct {
	host string
	conn net.Conn
}

func (f *flow) close() {
	if f.conn != nil {
		_ = f.conn.Close()
		f.conn = nil
	}
}

func (f *flow) ask(ctx context.Context) (answer, error) {
	if f.conn == nil {
		conn, err := connect(ctx, "udp", f.host)
		if err != nil {
			return answer{}, err
		}
		f.conn = conn
	}
	if deadline, ok := ctx.Deadline(); ok {
		_ = f.conn.SetDeadline(deadline)
	}
	a, err := exchange(f.conn)
	if err != nil {
		// A late answer must not be taken for that to the next request.
		f.close()
	}
	return a, err
}

func connect(ctx context.Context, network, host string) (net.Conn, error) {
	var conn net.Conn
	var err error
	if network == "sctp" {
		conn, err = dialSCTP(ctx, host)
	} else {
		var dialer net.Dialer
		conn, err = dialer.DialContext(ctx, network, host)
	}
	if err != nil {
		return nil, short(err)
	}
	if deadline, ok := ctx.Deadline(); ok {
		_ = conn.SetDeadline(deadline)
	}
	return conn, nil
}

func askHTTP(ctx context.Context, host string) (answer, error) {
	conn, err := connect(ctx, "tcp", host)
	if err != nil {
		return answer{}, err
	}
	defer conn.Close()
	if _, err := fmt.Fprintf(conn, "GET / HTTP/1.0\r\nHost: %s\r\n\r\n", host); err != nil {
		return answer{}, short(err)
	}
	lines := bufio.NewReader(conn)
	for {
		line, err := lines.ReadString('\n')
		if strings.HasPrefix(line, "{") {
			return parse(line)
		}
		if err != nil {
			return answer{}, short(err)
		}
	}
}

// askLine speaks to the TCP, SCTP and UDP echo servers. A TCP server greets;
// the line that is sent makes a UDP server answer and does a TCP server no harm.
func askLine(ctx context.Context, network, host string) (answer, error) {
	conn, err := connect(ctx, network, host)
	if err != nil {
		return answer{}, err
	}
	defer conn.Close()
	return exchange(conn)
}

func exchange(conn net.Conn) (answer, error) {
	if _, err := conn.Write([]byte("probe\n")); err != nil {
		return answer{}, short(err)
	}
	line, err := bufio.NewReader(conn).ReadString('\n')
	if err != nil {
		return answer{}, short(err)
	}
	return parse(line)
}

func parse(line string) (answer, error) {
	var a answer
	if err := json.Unmarshal([]byte(line), &a); err != nil {
		return a, fmt.Errorf("not an answer of the test server: %q", strings.TrimSpace(line))
	}
	return a, nil
}

// short drops the addresses and ports, which would make every error unique.
func short(err error) error {
	text := err.Error()
	if i := strings.LastIndex(text, ": "); i >= 0 {
		text = text[i+2:]
	}
	return fmt.Errorf("%s", text)
}
