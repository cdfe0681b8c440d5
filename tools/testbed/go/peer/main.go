// The other end of a connection that a test needs:
//
//	peer deny      a trivial validating webhook, which refuses what is labelled deny=yes and admits the rest
//	peer get URL   asks the API server, as the pod's service account, trusting the cluster's authority alone
package main

import (
	"crypto/tls"
	"crypto/x509"
	"encoding/json"
	"io"
	"log"
	"net/http"
	"os"
)

const account = "/var/run/secrets/kubernetes.io/serviceaccount/"

// review is what is used of admission.k8s.io/v1 AdmissionReview.
type review struct {
	APIVersion string    `json:"apiVersion"`
	Kind       string    `json:"kind"`
	Request    *request  `json:"request,omitempty"`
	Response   *response `json:"response,omitempty"`
}

type request struct {
	UID    string `json:"uid"`
	Object struct {
		Metadata struct {
			Labels map[string]string `json:"labels"`
		} `json:"metadata"`
	} `json:"object"`
}

type response struct {
	UID     string            `json:"uid"`
	Allowed bool              `json:"allowed"`
	Status  map[string]string `json:"status,omitempty"`
}

func main() {
	switch {
	case len(os.Args) == 2 && os.Args[1] == "deny":
		deny()
	case len(os.Args) == 3 && os.Args[1] == "get":
		get(os.Args[2])
	default:
		log.Fatal("peer deny | peer get URL")
	}
}

func get(url string) {
	authority, err := os.ReadFile(account + "ca.crt")
	if err != nil {
		log.Fatal(err)
	}
	token, err := os.ReadFile(account + "token")
	if err != nil {
		log.Fatal(err)
	}
	roots := x509.NewCertPool()
	roots.AppendCertsFromPEM(authority)
	client := http.Client{Transport: &http.Transport{TLSClientConfig: &tls.Config{RootCAs: roots}}}
	request, err := http.NewRequest(http.MethodGet, url, nil)
	if err != nil {
		log.Fatal(err)
	}
	request.Header.Set("Authorization", "Bearer "+string(token))
	response, err := client.Do(request)
	if err != nil {
		log.Fatal(err)
	}
	if _, err := io.Copy(os.Stdout, response.Body); err != nil || response.StatusCode != http.StatusOK {
		log.Fatal(response.Status, err)
	}
}

func deny() {
	http.HandleFunc("/healthz", func(http.ResponseWriter, *http.Request) {})
	http.HandleFunc("/", func(w http.ResponseWriter, r *http.Request) {
		var asked review
		if err := json.NewDecoder(r.Body).Decode(&asked); err != nil || asked.Request == nil {
			http.Error(w, "not an AdmissionReview", http.StatusBadRequest)
			return
		}
		answer := &response{UID: asked.Request.UID, Allowed: asked.Request.Object.Metadata.Labels["deny"] != "yes"}
		if !answer.Allowed {
			answer.Status = map[string]string{"message": "the denier refuses what is labelled deny=yes"}
		}
		w.Header().Set("Content-Type", "application/json")
		if err := json.NewEncoder(w).Encode(review{APIVersion: asked.APIVersion, Kind: asked.Kind, Response: answer}); err != nil {
			log.Print(err)
		}
	})
	log.Fatal(http.ListenAndServeTLS(":8443", "/tls/tls.crt", "/tls/tls.key", nil))
}
