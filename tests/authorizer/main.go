// Command authorizer is an external authorization server for tests: Envoy's ext_authz over gRPC, by the messages that Envoy
// publishes, and HTTP. The last element of the path says what it does.
//
//	authorizer [--grpc=9000] [--http=8000]     serves until it is killed
//	authorizer get URL [BODY]                  prints the status, the fields and the body of a response
//	authorizer tls ADDRESS NAME                prints the address and the names of a TLS server, asked for a name
package main

import (
	"context"
	"crypto/tls"
	"errors"
	"flag"
	"fmt"
	"io"
	"log"
	"net"
	"net/http"
	"os"
	"path"
	"strings"
	"sync"
	"time"

	core "github.com/envoyproxy/go-control-plane/envoy/config/core/v3"
	auth "github.com/envoyproxy/go-control-plane/envoy/service/auth/v3"
	types "github.com/envoyproxy/go-control-plane/envoy/type/v3"
	"google.golang.org/genproto/googleapis/rpc/status"
	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/peer"
	grpcstatus "google.golang.org/grpc/status"
)

const (
	// A question that is not answered ends with the proxy's patience.
	patience = time.Minute
	// The response of a request takes no longer.
	requestTimeout = 30 * time.Second
)

func main() {
	log.SetFlags(0)
	if len(os.Args) == 3 && os.Args[1] == "get" {
		get(os.Args[2], nil)
		return
	}
	if len(os.Args) == 4 && os.Args[1] == "get" {
		get(os.Args[2], strings.NewReader(os.Args[3]))
		return
	}
	if len(os.Args) == 4 && os.Args[1] == "tls" {
		handshake(os.Args[2], os.Args[3])
		return
	}
	grpcPort := flag.Int("grpc", 9000, "port of ext_authz")
	httpPort := flag.Int("http", 8000, "port of HTTP")
	flag.Parse()
	connections := &connections{open: map[string]net.Conn{}}
	server := grpc.NewServer()
	auth.RegisterAuthorizationServer(server, &envoy{connections: connections})
	go func() { log.Fatal(server.Serve(connections.listen(*grpcPort))) }()
	log.Fatal(http.Serve(connections.listen(*httpPort), plain{connections}))
}

// handshake verifies nothing: it tells which server answers.
func handshake(address, name string) {
	dialer := tls.Dialer{
		NetDialer: &net.Dialer{Timeout: requestTimeout},
		Config:    &tls.Config{ServerName: name, InsecureSkipVerify: true},
	}
	context, cancel := context.WithTimeout(context.Background(), requestTimeout)
	defer cancel()
	conn, err := dialer.DialContext(context, "tcp", address)
	if err != nil {
		fmt.Println("no handshake:", err)
		return
	}
	defer conn.Close()
	leaf := conn.(*tls.Conn).ConnectionState().PeerCertificates[0]
	fmt.Println("handshake:", leaf.Subject, leaf.DNSNames)
}

// connections are those that a test may want to be reset, by the addresses of their clients.
type connections struct {
	mutex sync.Mutex
	open  map[string]net.Conn
}

// listener adds the connections that it accepts.
type listener struct {
	net.Listener
	connections *connections
}

func (c *connections) listen(port int) net.Listener {
	inner, err := net.Listen("tcp", fmt.Sprintf(":%d", port))
	if err != nil {
		log.Fatal(err)
	}
	return listener{inner, c}
}

func (l listener) Accept() (net.Conn, error) {
	conn, err := l.Listener.Accept()
	if err == nil {
		l.connections.mutex.Lock()
		defer l.connections.mutex.Unlock()
		l.connections.open[conn.RemoteAddr().String()] = conn
	}
	return conn, err
}

func (c *connections) reset(address string) {
	c.mutex.Lock()
	defer c.mutex.Unlock()
	if conn, ok := c.open[address].(*net.TCPConn); ok {
		conn.SetLinger(0)
		conn.Close()
	}
	delete(c.open, address)
}

type envoy struct {
	auth.UnimplementedAuthorizationServer
	connections *connections
}

func (e *envoy) Check(ctx context.Context, request *auth.CheckRequest) (*auth.CheckResponse, error) {
	asked := request.Attributes.Request.Http
	log.Printf("grpc %s %s from %s", asked.Method, asked.Path, request.Attributes.Source.Principal)
	switch action(asked.Path) {
	case "deny":
		return &auth.CheckResponse{
			Status: &status.Status{Code: int32(codes.PermissionDenied)},
			HttpResponse: &auth.CheckResponse_DeniedResponse{DeniedResponse: &auth.DeniedHttpResponse{
				Status:  &types.HttpStatus{Code: types.StatusCode_Unauthorized},
				Headers: []*core.HeaderValueOption{option("www-authenticate", "Basic realm=\"test\"")},
				Body:    "denied by gRPC" + asked.Body + asked.Headers["x-envoy-auth-partial-body"],
			}},
		}, nil
	case "error":
		return nil, grpcstatus.Error(codes.Internal, "no")
	case "empty":
		return &auth.CheckResponse{}, nil
	case "slow":
		wait(ctx)
	case "reset":
		if from, ok := peer.FromContext(ctx); ok {
			e.connections.reset(from.Addr.String())
		}
	}
	return &auth.CheckResponse{
		Status: &status.Status{Code: int32(codes.OK)},
		HttpResponse: &auth.CheckResponse_OkResponse{OkResponse: &auth.OkHttpResponse{
			Headers: []*core.HeaderValueOption{option("x-user", "ada")},
		}},
	}, nil
}

func option(name, value string) *core.HeaderValueOption {
	return &core.HeaderValueOption{Header: &core.HeaderValue{Key: name, Value: value}}
}

type plain struct{ connections *connections }

func (p plain) ServeHTTP(response http.ResponseWriter, request *http.Request) {
	log.Printf("http %s %s from %s", request.Method, request.URL.Path, request.Header.Get("X-Mesh-Caller"))
	switch action(request.URL.Path) {
	case "deny":
		response.WriteHeader(http.StatusForbidden)
		io.WriteString(response, "denied by HTTP")
		io.Copy(response, request.Body)
		io.WriteString(response, request.Header.Get("X-Envoy-Auth-Partial-Body"))
	case "error":
		response.WriteHeader(http.StatusInternalServerError)
	case "empty":
		if conn, _, err := http.NewResponseController(response).Hijack(); err == nil {
			conn.Close()
		}
	case "slow":
		wait(request.Context())
	case "reset":
		p.connections.reset(request.RemoteAddr)
	default:
		response.Header().Set("X-User", "ada")
	}
}

// action is the last element of a path.
func action(target string) string {
	return path.Base(strings.SplitN(target, "?", 2)[0])
}

func wait(ctx context.Context) {
	select {
	case <-ctx.Done():
	case <-time.After(patience):
	}
}

// get prints a response, or why there is none.
func get(url string, sent io.Reader) {
	client := http.Client{
		Timeout:       requestTimeout,
		CheckRedirect: func(*http.Request, []*http.Request) error { return http.ErrUseLastResponse },
	}
	request, err := http.NewRequest(http.MethodGet, url, sent)
	if err != nil {
		log.Fatal(err)
	}
	request.Header.Set("X_User", "forged")
	response, err := client.Do(request)
	if err != nil {
		log.Fatal(errors.Unwrap(err))
	}
	defer response.Body.Close()
	body, err := io.ReadAll(response.Body)
	if err != nil {
		log.Fatal(err)
	}
	fmt.Println(response.StatusCode)
	response.Header.Write(os.Stdout)
	fmt.Printf("\n%s", body)
}
