module pointsman.dev/e2e/testserver

go 1.26.0
