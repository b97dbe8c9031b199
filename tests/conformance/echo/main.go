// Command client is the application of the conformance tests: a server that reports the requests it receives, and a client
// that a test executes in the same container. The names of the fields are those that the tests parse.
//
//	client [--port=8080]... [--grpc=7070]     serves until it is killed; without flags on port 8080. Other flags are ignored
//	client URL [--method=M] [-H NAME:VALUE]... [--count=N]
package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"log"
	"net"
	"net/http"
	"net/url"
	"os"
	"strconv"
	"strings"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/credentials/insecure"
	"google.golang.org/grpc/metadata"
	"google.golang.org/grpc/peer"
	"google.golang.org/protobuf/types/known/wrapperspb"
)

const (
	grpcMethod     = "/proto.EchoTestService/Echo"
	requestTimeout = 10 * time.Second
)

func main() {
	run := serve
	if len(os.Args) > 1 && !strings.HasPrefix(os.Args[1], "-") {
		run = call
	}
	if err := run(os.Args[1:]); err != nil {
		log.Fatal(err)
	}
}

func serve(arguments []string) error {
	failed := make(chan error)
	if len(arguments) == 0 {
		arguments = []string{"--port=8080"}
	}
	for _, argument := range arguments {
		name, port, _ := strings.Cut(argument, "=")
		var start func(net.Listener, string) error
		switch name {
		case "--port":
			start = serveHTTP
		case "--grpc":
			start = serveGRPC
		default:
			continue
		}
		listener, err := net.Listen("tcp", ":"+port)
		if err != nil {
			return err
		}
		go func() { failed <- start(listener, port) }()
	}
	return <-failed
}

func serveHTTP(listener net.Listener, port string) error {
	return http.Serve(listener, http.HandlerFunc(func(response http.ResponseWriter, request *http.Request) {
		fields := append(identity(port, request.Host, request.RemoteAddr),
			"Method="+request.Method, "URL="+request.RequestURI, "Proto="+request.Proto)
		for name, values := range request.Header {
			for _, value := range values {
				fields = append(fields, "RequestHeader="+name+":"+value)
			}
		}
		io.WriteString(response, strings.Join(fields, "\n")+"\n")
	}))
}

func serveGRPC(listener net.Listener, port string) error {
	reply := func(_ any, stream grpc.ServerStream) error {
		if err := stream.RecvMsg(&wrapperspb.StringValue{}); err != nil {
			return err
		}
		host, remote := "", ""
		if client, ok := peer.FromContext(stream.Context()); ok {
			remote = client.Addr.String()
		}
		received, _ := metadata.FromIncomingContext(stream.Context())
		if authority := received.Get(":authority"); len(authority) > 0 {
			host = authority[0]
		}
		fields := append(identity(port, host, remote), "Proto=GRPC")
		for name, values := range received {
			for _, value := range values {
				fields = append(fields, "RequestHeader="+name+":"+value)
			}
		}
		return stream.SendMsg(wrapperspb.String(strings.Join(fields, "\n") + "\n"))
	}
	return grpc.NewServer(grpc.UnknownServiceHandler(reply)).Serve(listener)
}

// identity is what a server says about itself and its client.
func identity(port, host, remote string) []string {
	hostname, _ := os.Hostname()
	address, _, _ := net.SplitHostPort(remote)
	return []string{"ServicePort=" + port, "Host=" + host, "IP=" + address, "Hostname=" + hostname}
}

func call(arguments []string) error {
	target, err := url.Parse(arguments[0])
	if err != nil {
		return err
	}
	method, count, header := http.MethodGet, 1, http.Header{}
	for rest := arguments[1:]; len(rest) > 0; rest = rest[1:] {
		name, value, _ := strings.Cut(rest[0], "=")
		switch {
		case name == "--method":
			method = value
		case name == "--count":
			if count, err = strconv.Atoi(value); err != nil {
				return err
			}
		case name == "-H" && len(rest) > 1:
			rest = rest[1:]
			field, value, _ := strings.Cut(rest[0], ":")
			header.Add(field, value)
		default:
			return fmt.Errorf("unknown argument %q", rest[0])
		}
	}
	send := func(context.Context) (string, error) { return "", fmt.Errorf("unknown scheme %q", target.Scheme) }
	switch target.Scheme {
	case "http":
		send = func(ctx context.Context) (string, error) { return sendHTTP(ctx, method, target, header) }
	case "grpc":
		send = func(ctx context.Context) (string, error) { return sendGRPC(ctx, target, header) }
	}
	for number := range count {
		ctx, cancel := context.WithTimeout(context.Background(), requestTimeout)
		text, err := send(ctx)
		cancel()
		if err != nil {
			return err
		}
		// A blank line separates two responses.
		fmt.Printf("[%d] Url=%s\n%s\n", number, target, text)
	}
	return nil
}

// sendHTTP uses a connection of its own and does not follow redirects.
func sendHTTP(ctx context.Context, method string, target *url.URL, header http.Header) (string, error) {
	request, err := http.NewRequestWithContext(ctx, method, target.String(), nil)
	if err != nil {
		return "", err
	}
	request.Header = header.Clone()
	request.Close = true
	if host := request.Header.Get("Host"); host != "" {
		request.Host = host
	}
	response, err := http.DefaultTransport.RoundTrip(request)
	if err != nil {
		return "", err
	}
	defer response.Body.Close()
	body, err := io.ReadAll(response.Body)
	if err != nil {
		return "", err
	}
	lines := []string{"StatusCode=" + strconv.Itoa(response.StatusCode)}
	for name, values := range response.Header {
		for _, value := range values {
			lines = append(lines, "ResponseHeader="+name+":"+value)
		}
	}
	return strings.Join(lines, "\n") + "\n" + string(body), nil
}

// sendGRPC reports the status of HTTP: 200 for a call that succeeded.
func sendGRPC(ctx context.Context, target *url.URL, header http.Header) (string, error) {
	connection, err := grpc.NewClient(target.Host, grpc.WithTransportCredentials(insecure.NewCredentials()))
	if err != nil {
		return "", err
	}
	defer connection.Close()
	for name, values := range header {
		for _, value := range values {
			ctx = metadata.AppendToOutgoingContext(ctx, name, value)
		}
	}
	reply := &wrapperspb.StringValue{}
	if err := connection.Invoke(ctx, grpcMethod, wrapperspb.String(""), reply); err != nil {
		return "", errors.Join(errors.New("call of "+target.Host), err)
	}
	return "StatusCode=200\n" + reply.GetValue(), nil
}
