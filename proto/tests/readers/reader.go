// What Go reads from paths: a path per line in, its readings per line out, separated by tabs.
package main

import (
	"bufio"
	"fmt"
	"net/http"
	"net/url"
	"os"
	"path"
	"strings"
)

func main() {
	lines := bufio.NewScanner(os.Stdin)
	for lines.Scan() {
		var readings []string
		add := func(name, reading string) { readings = append(readings, name+"="+reading) }
		addAll := func(name string, read *url.URL) {
			if read.RawPath != "" {
				add(name+"-raw", read.RawPath)
			}
			decoded := read.Path
			if decoded == "" {
				decoded = "/"
			}
			add(name, decoded)
			add(name+"-clean", path.Clean(decoded))
		}
		request := "GET " + lines.Text() + " HTTP/1.1\r\nHost: localhost\r\n\r\n"
		if read, err := http.ReadRequest(bufio.NewReader(strings.NewReader(request))); err == nil {
			addAll("go-http", read.URL)
		}
		if read, err := url.Parse(lines.Text()); err == nil {
			addAll("go-url.Parse", read)
		}
		base, _ := url.Parse("http://localhost")
		if read, err := base.Parse(lines.Text()); err == nil {
			addAll("go-URL.Parse", read)
		}
		fmt.Println(strings.Join(readings, "\t"))
	}
}
