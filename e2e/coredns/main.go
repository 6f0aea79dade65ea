// Command coredns is CoreDNS with only the plugins that a cluster's DNS needs,
// so that it builds quickly and makes a small image.
package main

import (
	"github.com/coredns/coredns/core/dnsserver"
	"github.com/coredns/coredns/coremain"

	_ "github.com/coredns/coredns/plugin/cache"
	_ "github.com/coredns/coredns/plugin/errors"
	_ "github.com/coredns/coredns/plugin/health"
	_ "github.com/coredns/coredns/plugin/kubernetes"
	_ "github.com/coredns/coredns/plugin/loadbalance"
	_ "github.com/coredns/coredns/plugin/log"
	_ "github.com/coredns/coredns/plugin/ready"
)

func main() {
	// The order in which plugins handle a query; the default list names
	// plugins that are not compiled in here.
	dnsserver.Directives = []string{
		"health", "ready", "errors", "log", "cache", "loadbalance", "kubernetes",
	}
	coremain.Run()
}
